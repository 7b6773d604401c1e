"""`dear evaluate`: accuracy of a run on labeled images."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_accuracy, print_json, print_unreadable, stages


def evaluate(
    run: opt.Run,
    data: opt.Data,
    mode: opt.Mode = None,
    data_root: opt.DataRoot = None,
    margin: opt.MarginOrRun = None,
    split: opt.Split = "test",
    template: opt.Template = None,
    unreadable: opt.Unreadable = "stop",
    unknown: Annotated[
        str | None,
        Option(help="Images of none of the run's classes (folder, table or dataset): measure rejection."),
    ] = None,
    reject_share: opt.RejectShare = 0.05,
    backbone: opt.RunBackbone = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Measure the accuracy of a run on labeled images, overall and per class; classes may be new ones.

    Class names are inserted into the template that the run was trained with, unless --template is given.

    Examples:

    `dear evaluate run --data photos/`

    `dear evaluate run --data world:textures --mode decoupled --json`

    `dear evaluate run --data photos/ --unknown others/`
    """
    from dear.tasks.evaluate import evaluate as measure

    with stages() as progress:
        evaluation = measure(
            run,
            data,
            mode=mode,
            data_root=data_root,
            margin=margin,
            split=split,
            template=template,
            unreadable=unreadable,
            unknown=unknown,
            reject_share=reject_share,
            backbone=backbone,
            device=device,
            progress=progress,
        )
    print_unreadable(evaluation)
    if as_json:
        print_json({"run": str(run), "data": data, **evaluation.to_dict()})
        return
    print_accuracy(evaluation, f"{run} on {data}")
    if evaluation.rejection is not None:
        echo(evaluation.rejection.sentence())
