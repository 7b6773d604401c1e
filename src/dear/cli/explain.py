"""`dear explain`: why a run answers as it does."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, say, stages
from dear.errors import UsageError


def explain(
    run: opt.Run,
    images: Annotated[
        list[str] | None,
        Argument(help="Images, folders or patterns; leave out to explain --data.", show_default=False),
    ] = None,
    answer: Annotated[
        str | None, Option("--class", help="Class to explain (default: the answer for each image).")
    ] = None,
    against: Annotated[str | None, Option(help="Class to compare with (default: the runner-up).")] = None,
    data: Annotated[
        str | None,
        Option(
            "--data",
            "-d",
            help="Alone: a labeled set to explain. With images: reference images (default: training).",
        ),
    ] = None,
    split: Annotated[str, Option(help="Part of --data to explain: train, test, val, or all.")] = "test",
    out: Annotated[str | None, Option("--out", "-o", help="The page to write.")] = None,
    roles: opt.Roles = None,
    mode: opt.Mode = None,
    data_root: opt.DataRoot = None,
    backbone: opt.RunBackbone = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Explain answers: the score as a sum over heads and patches, and the answer without a role.

    With images: bars per role for the answer and the runner-up, relative to an average training image,
    heatmaps, the most influential heads, similar training images, and answers without a role or concept.
    With --data alone: which roles carry right and wrong answers, and images answered for an unusual reason.

    Examples:

    `dear explain run photo.jpg --out why.html`

    `dear explain run photo.jpg --class dog --against wolf --json`

    `dear explain run --data photos/ --out why.html`
    """
    from dear.tasks.explain.dataset import SetExplanation
    from dear.tasks.explain.task import explain as explain_run

    if not images and data is None:
        raise UsageError("explain needs images, or a labeled set with --data, got neither")
    if not images and (answer or against):
        raise UsageError("--class and --against need images; leave them out with --data alone")
    with stages() as progress:
        result = explain_run(
            run,
            images or None,
            answer=answer,
            against=against,
            data=data,
            split=split,
            roles=roles,
            mode=mode,
            data_root=data_root,
            out=out,
            backbone=backbone,
            device=device,
            progress=progress,
        )
    if as_json:
        print_json(result.to_dict())
        return
    if isinstance(result, SetExplanation):
        for name, right, count, mixture in result.mixtures():
            several = "1 image" if count == 1 else f"{count} images"
            answers = f"{name}, {several} answered {'right' if right else 'wrong'}"
            echo(f"{answers}; largest part: {result.parts[int(mixture.argmax())]}")
    else:
        for one in result:
            echo(f"{one.image}: {one.sentence}")
    for notice in result.notices:
        say(f"notice: {notice}")
    if out is not None:
        say(f"{out}: written")
