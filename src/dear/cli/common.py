"""What the commands share: options that mean the same everywhere, printing, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from dear._io.printable import shown, unprintable

if TYPE_CHECKING:
    from rich.console import Console

    from dear.train.evaluate import Evaluation

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
DataRoot = Annotated[str | None, typer.Option("--data-root", help="Where the benchmark datasets are kept.")]
Template = Annotated[
    str | None, typer.Option("--template", help='The prompt, with {} for the class: "a photo of a {}."')
]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")
]
TensorBoard = Annotated[
    str | None, typer.Option("--tensorboard", help="Also log to this folder for `tensorboard --logdir`.")
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


def say(text: str) -> None:
    """A sentence for people on standard error, as it is: no markup, no wrapping, no control characters."""
    console().print(shown(text), markup=False, highlight=False, soft_wrap=True)


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


@contextmanager
def stages() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each named stage of long work; silence when not on a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console(), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def told(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield told


@contextmanager
def stoppable(more: Callable[[], str]) -> Iterator[None]:
    """Work that Ctrl-C may stop; the sentence then says what `more` answers: how to go on."""
    from dear.errors import Interrupted

    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"stopped by you{more()}") from None


@contextmanager
def training_bar() -> Iterator[Callable[[int, int, Mapping[str, float | int]], None]]:
    """A bar that also shows the last line of the training log; silence when not on a terminal."""
    with progress("training") as bar:
        yield lambda done, total, line: bar(done, total)


def print_accuracy(found: Evaluation, title: str, mode: str | None = None) -> None:
    """An evaluation as a table: a row a class, the chosen mode's accuracy, and all modes' below."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    report = found.report(mode)
    table = Table(title=Text(title), header_style="bold")
    table.add_column("class")
    table.add_column("accuracy", justify="right")
    for name, accuracy in report["per_class"].items():
        table.add_row(Text(name), f"{accuracy:.1%}")
    Console().print(table)
    for name, accuracy in report["modes"].items():
        label = "accuracy" if name == "default" else f"accuracy, {name}"
        typer.echo(f"{label}: {accuracy:.2%} of {report['images']} images")


def parse_pairs(items: Sequence[str] | None, option: str) -> dict[str, Any]:
    """`NAME=VALUE` options as a mapping; values are read as JSON where they are JSON.

    >>> parse_pairs(["beta=0.8", "isolation=readonly"], "--set")
    {'beta': 0.8, 'isolation': 'readonly'}

    Raises:
        UsageError: an item has no equals sign.
    """
    from dear.errors import UsageError

    result: dict[str, Any] = {}
    for item in items or ():
        name, sign, value = item.partition("=")
        if not sign or not name:
            raise UsageError(f"{option} {item}: write it as NAME=VALUE")
        try:
            result[name] = json.loads(value)
        except ValueError:
            result[name] = value
    return result


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    plain = unprintable(text) is None  # else the same JSON in escapes: a file's name may hold anything
    typer.echo(text if plain else json.dumps(value, allow_nan=False))


def device_named(name: str) -> str:
    """The device to use: `auto` is the first GPU where there is one.

    Raises:
        UsageError: the device does not exist here.
    """
    from dear.clip.device import pick_device
    from dear.errors import UsageError

    try:
        return pick_device(name)
    except UsageError as error:
        raise UsageError(f"--{error}") from None
