"""`dear drift`: do new images still look like those a run was trained on?"""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, stages
from dear.utils.text import format_count


def drift(
    run: opt.Run,
    images: Annotated[list[str], Argument(help="New images: files, folders or patterns; no labels.")],
    backbone: opt.RunBackbone = None,
    out: Annotated[str | None, Option("--out", "-o", help="Write a page with the farthest images.")] = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Report whether new images still resemble the training images of a run.

    An image is far when it is farther from the training images than 95% of these are from each other; if
    nothing changed, about 5% of new images are far. A two-sample test compares the features as a whole.
    Labels are not needed; at least ten images are. The exit status is 0 either way; see `--json`.

    Example: `dear drift run photos-of-this-week/`
    """
    from dear.tasks.drift import drift as compare

    with stages() as progress:
        result = compare(run, images, out=out, backbone=backbone, device=device, progress=progress)
    if as_json:
        print_json(result.to_dict())
        return
    echo(result.verdict)
    counts = f"{result.images} new and {result.reference} training images"
    echo(f"two-sample test of {counts}: p = {result.p:.3f}")
    for each in result.classes[:10]:
        echo(f"  predicted {each.name}: {format_count(each.images, 'image')}, {each.far:.1%} far")
    echo("farthest from the training images:")
    for name in result.examples:
        echo(f"  {name}")
    for reason in result.unreadable:
        echo(f"unreadable: {reason}")
