"""`dear push`, `dear pull` and `dear bundle`: share a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import echo, say
from dear.utils.text import format_bytes


def push(
    run: opt.Run,
    name: Annotated[str, Argument(help="Where to: owner/name on the Hugging Face hub.")],
    private: Annotated[bool, Option("--private", help="Visible to you only, if it is new.")] = False,
) -> None:
    """Upload a run to the Hugging Face hub, with a model card made from its own figures.

    Log in first with `hf auth login`. The backbone is not uploaded: the card names it.

    Example: `dear push run my-name/my-flowers`
    """
    from dear.tasks.share.task import push as upload

    say(f"uploaded: {upload(run, name, private=private)}")
    echo(f"dear predict hf://{name} photo.jpg")


def pull(
    name: Annotated[str, Argument(help="owner/name or owner/name@revision on the Hugging Face hub.")],
    out: opt.RunOut,
) -> None:
    """Download a run from the Hugging Face hub.

    Every command that takes a run also takes `hf://owner/name` in its place.

    Example: `dear pull my-name/my-flowers --out run`
    """
    from dear.tasks.share.task import pull as download

    say(f"{download(name, out)}: written")


def bundle(
    run: opt.Run,
    out: Annotated[Path, Argument(help="The archive to write, ending in .zip.")],
    backbone: opt.RunBackbone = None,
) -> None:
    """Write one archive with a run and its backbone, for a machine without network.

    Every command that takes a run also takes the archive in its place.

    Example: `dear bundle run flowers.zip`, then elsewhere `dear predict flowers.zip photo.jpg`
    """
    from dear.tasks.share.task import bundle as pack

    made = pack(run, out, backbone)
    say(f"{made}: written, {format_bytes(made.stat().st_size)}")
