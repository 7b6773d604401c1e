"""`dear evaluate`: accuracy of a run on labeled images."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_accuracy, print_json, print_unreadable, say, stages
from dear.errors import DiskError, RunError


def evaluate(
    run: opt.Run,
    data: opt.Data,
    mode: opt.Mode = None,
    data_root: opt.DataRoot = None,
    split: opt.Split = "test",
    template: opt.Template = None,
    unreadable: opt.Unreadable = "stop",
    unknown: Annotated[
        str | None, Option(help="Images of no class of the run: a folder, table or dataset.")
    ] = None,
    reject_share: Annotated[float, Option(help="Share of known images that --unknown may refuse.")] = 0.05,
    backbone: opt.OwnBackbone = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Accuracy of a run on labeled images, overall and for each class; classes may be new ones.

    New classes are put into the template that the run was trained with, unless --template gives another.

    Examples:

    `dear evaluate run --data photos/`

    `dear evaluate run --data world:textures --mode decoupled --json`

    `dear evaluate run --data photos/ --unknown others/`
    """
    from dear.data import open_data
    from dear.runs.folder import add_metrics
    from dear.runs.model import Model
    from dear.tasks.evaluate import check_known, evaluate_run, evaluate_unknown

    model = Model.load(run, backbone, opt.device_named(device)).with_classes(template=template)
    images = open_data(data, split, root=data_root)
    if unknown is not None:
        check_known(model, images.classes, reject_share, mode)
    rejection = None
    with stages() as progress:
        found = evaluate_run(
            model, images, mode=mode, scores=unknown is not None, unreadable=unreadable, progress=progress
        )
        if unknown is not None:
            rejection = evaluate_unknown(
                model, found, unknown, share=reject_share, mode=mode, root=data_root, progress=progress
            )
    print_unreadable(found)
    report = found.report(mode)
    if rejection is not None:
        report["unknown"] = rejection.report()
    if as_json:
        print_json({"run": str(run), "data": data, **report})
    else:
        print_accuracy(found, f"{run} on {data}", mode)
        if rejection is not None:
            echo(rejection.sentence())
    figures = {"accuracy": report["modes"], "images": report["images"], "ece": report["ece"]}
    try:
        add_metrics(run, **{f"evaluation of {data} ({split})": figures})
    except (DiskError, RunError) as error:  # the answer is printed; only the note in the folder is missing
        say(f"not added to the run's metrics: {error}")
