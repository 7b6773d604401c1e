"""`dear demo`: what the package does, on the embedded backbone and world."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results and the page.")] = Path(
        "demo"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="One task, fewer images and epochs.")] = False,
) -> None:
    """See what the package does: a page about heads, adaptation, shortcuts, focus; minutes on two cores.

    Example: `dear demo --out demo`
    """
    from dear.workflows.demo import demo as story

    story(out, quick, typer.echo)
    typer.echo(f"\nOpen {out / 'index.html'} in a browser. For your own images, one folder per class:")
    typer.echo("  dear adapt --data photos/ --backbone openai/clip-vit-base-patch16 --out run")
    typer.echo("  dear evaluate run --data photos/")
    typer.echo("  dear predict run image.jpg")
