"""What the commands share: options that mean the same everywhere, printing, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

if TYPE_CHECKING:
    from rich.console import Console

Backbone = Annotated[
    str,
    typer.Option(
        "--backbone", "-b", help="An embedded name (mini), a hub name, a folder or a checkpoint file."
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data", "-d", help="A folder of class folders, a CSV/JSONL table, a benchmark name, or world:NAME."
    ),
]
DataRoot = Annotated[str | None, typer.Option("--data-root", help="Where the benchmark data sets are kept.")]
Template = Annotated[
    str | None, typer.Option("--template", help='The prompt, with {} for the class: "a photo of a {}."')
]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs, and nothing else.")]


class Progress(Protocol):
    """Called with the work done and the work there is."""

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` is done."""


def console() -> Console:
    """The console for people; progress and notices go to standard error."""
    from rich.console import Console

    return Console(stderr=True)


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A progress bar on a terminal; silence elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console(), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    typer.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def device_named(name: str) -> str:
    """The device to use: `auto` is the first GPU where there is one.

    Raises:
        UsageError: the device does not exist here.
    """
    import torch

    from dear.errors import UsageError

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: not usable here ({str(error).splitlines()[0]})") from None
    return name
