"""`dear demo`: what the package does, on the embedded backbone and world or on photos."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import echo


def demo(
    out: Annotated[Path, Option("--out", "-o", help="Folder for the results and the pages.")] = Path("demo"),
    data: Annotated[
        str | None, Option("--data", "-d", help="Your own labeled photos instead of drawn images.")
    ] = None,
    backbone: Annotated[str | None, Option("--backbone", "-b", help="Backbone, with --data.")] = None,
    quick: Annotated[bool, Option("--quick", help="One task, fewer images and epochs.")] = False,
    data_root: opt.DataRoot = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """See what the package does, on drawn images or your own photos: one page, minutes on two cores.

    Examples:

    `dear demo --out demo`

    `dear demo --data photos/ --backbone openai/clip-vit-base-patch16 --out demo`
    """
    from dear.tasks.demo.task import demo as run_demo

    run_demo(
        out, data=data, backbone=backbone, quick=quick, data_root=data_root, device=device, progress=echo
    )
    echo(f"\nOpen {out / 'index.html'} in a browser.")
    if data is None:
        echo("The same for your own photos, one folder per class:")
        echo("  dear demo --data photos/ --backbone openai/clip-vit-base-patch16 --out demo-photos")
