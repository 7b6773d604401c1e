"""`dear demo`: what the package does, on the embedded backbone and world."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from dear.cli.options import Threads
from dear.cli.printing import echo


def demo(
    out: Annotated[Path, Option("--out", "-o", help="Folder for the results and the page.")] = Path("demo"),
    quick: Annotated[bool, Option("--quick", help="One task, fewer images and epochs.")] = False,
    threads: Threads = None,
) -> None:
    """See what the package does: a page about heads, adaptation, shortcuts, focus; minutes on two cores.

    Example: `dear demo --out demo`
    """
    from dear.tasks.demo.task import demo as story

    story(out, quick, echo)
    echo(f"\nOpen {out / 'index.html'} in a browser. For your own images, one folder per class:")
    echo("  dear adapt --data photos/ --backbone openai/clip-vit-base-patch16 --out run")
    echo("  dear evaluate run --data photos/")
    echo("  dear predict run image.jpg")
