"""Shared by the commands: common options, printing, progress."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dear._io.progress import Progress
from dear._io.text import duration, shown, unprintable

if TYPE_CHECKING:
    from rich.console import Console

    from dear.runs.evaluate import Evaluation

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


def run_folder(source: str) -> Path:
    """The folder of a run: the folder itself, or where `hf://owner/name` or an archive was put."""
    if not source.startswith("hf://") and not source.lower().endswith(".zip"):
        return Path(source)
    from dear.runs.share import local_run

    return local_run(source)


Run = Annotated[
    Path,
    typer.Argument(
        help="Run folder that `dear adapt` wrote, archive of `dear bundle`, or hf://owner/name.",
        parser=run_folder,
        metavar="RUN",
        show_default=False,
    ),
]
OwnBackbone = Annotated[
    str | None, typer.Option("--backbone", "-b", help="The backbone, if it moved since training.")
]
Roles = Annotated[str | None, typer.Option("--roles", help="Role map of the backbone.")]
Split = Annotated[str, typer.Option("--split", help="train, test, val or all.")]
Mode = Annotated[
    str | None,
    typer.Option("--mode", help="fused or decoupled (DeAR); the method's usual mode if left out."),
]
Unreadable = Annotated[
    str, typer.Option("--unreadable", help="Images that cannot be read: stop, or skip and report.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs, and nothing else.")]


def console() -> Console:
    """The console for people; progress and notices go to standard error."""
    from rich.console import Console

    return Console(stderr=True)


def say(text: str) -> None:
    """A sentence for people on standard error, as it is: no markup, no wrapping, no control characters."""
    console().print(shown(text), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def stages() -> Iterator[Progress]:
    """A bar for each named stage of long work; elsewhere than on a terminal a line now and then."""
    if not sys.stderr.isatty():
        yield ProgressLines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console(), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield report


class ProgressLines:
    """Progress where no bar can be drawn: nothing for a few seconds of work, then a line every half minute.

    The first line comes when enough is done to say how long the rest will take.
    """

    FIRST, NEXT = 5.0, 30.0  #: seconds until the first line of a stage, and between two lines

    def __init__(self) -> None:
        self._began: dict[str, tuple[float, int]] = {}
        self._next: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """See `Progress`."""
        now = time.monotonic()
        if stage not in self._began:
            self._began[stage] = (now, done)
            self._next[stage] = now + self.FIRST
            return
        began, first = self._began[stage]
        if now < self._next[stage] or not total or done <= first or done >= total:
            return
        self._next[stage] = now + self.NEXT
        left = (now - began) / (done - first) * (total - done)
        say(f"{stage}: {done} of {total} ({done / total:.1%}), about {duration(left)} left")


@contextmanager
def stoppable(more: Callable[[], str]) -> Iterator[None]:
    """Work that Ctrl-C may stop; the sentence then says what `more` answers: how to go on."""
    from dear.errors import Interrupted

    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"stopped by you{more()}") from None


def print_accuracy(found: Evaluation, title: str, mode: str | None = None) -> None:
    """An evaluation as a table: one row per class, the chosen mode's accuracy, and all modes' below."""
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
    if "worst_group" in report:
        worst = report["worst_group"]
        group = f"{shown(worst['group'])} (worst of {worst['groups']} groups of class and value)"
        typer.echo(f"worst group: {worst['accuracy']:.1%}, {group}")
    for name, accuracy in report["modes"].items():
        label = "accuracy" if name == "default" else f"accuracy, {name}"
        typer.echo(f"{label}: {accuracy:.1%} of {report['images']} images")
    line = f"calibration error: {report['ece']:.1%}"
    if report["ece_trained"] is not None and report["ece_new"] is not None:
        line += f"; {report['ece_trained']:.1%} for trained classes, {report['ece_new']:.1%} for new ones"
    typer.echo(line)


def parse_pairs(items: Sequence[str] | None, option: str) -> dict[str, Any]:
    """`NAME=VALUE` options as a mapping; values are read as JSON where they are JSON.

    >>> parse_pairs(["beta=0.8", "isolation=readonly"], "--set")
    {'beta': 0.8, 'isolation': 'readonly'}
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


def read_recipe(items: Sequence[str] | None) -> tuple[str | None, dict[str, Any]]:
    """`--recipe` items: the name of a preset, if one is given, and the values by name.

    >>> read_recipe(["strong", "epochs=5"])
    ('strong', {'epochs': 5})
    """
    from dear.errors import UsageError

    presets = [item for item in items or () if "=" not in item]
    if len(presets) > 1:
        raise UsageError(f"--recipe {presets[0]} and --recipe {presets[1]}: name one preset")
    values = parse_pairs([item for item in items or () if "=" in item], "--recipe")
    return (presets[0] if presets else None), values


def added_names(names: list[str] | None) -> tuple[list[str] | None, bool]:
    """Class names without the `+` that says they come to the run's own, and whether it stood there.

    >>> added_names(["+red fox", "wolf"]), added_names(["a", "b"])
    ((['red fox', 'wolf'], True), (['a', 'b'], False))
    """
    from dear.errors import UsageError

    if names is None or not names[0].startswith("+"):
        return names, False
    plain = [name.removeprefix("+").strip() for name in names]
    if not all(plain):
        raise UsageError("--classes: write the name of a class after the +")
    return plain, True


def class_names(classes: str | None, file: Path | None) -> list[str] | None:
    """The names of `--classes` or `--classes-file`; None if neither is given."""
    from dear._io.files import read_text
    from dear.errors import UsageError

    if classes is None and file is None:
        return None
    if classes is not None and file is not None:
        raise UsageError("--classes and --classes-file: give one of them")
    if file is not None:
        names = [line.strip() for line in read_text(file, "list of classes").splitlines() if line.strip()]
        if not names:
            raise UsageError(f"--classes-file {file}: names no class; write one per line")
        say(f"classes: {len(names)} from {file}, the first is {names[0]!r}")
        return names
    names = [name.strip() for name in (classes or "").split(",") if name.strip()]
    if not names:
        raise UsageError("--classes names no class; give names with commas between")
    if len(names) == 1 and os.path.isfile(names[0]):
        raise UsageError(f"--classes {names[0]}: is a file; give it as --classes-file {names[0]}")
    if len(names) == 1 and not names[0].startswith("+"):
        say(f"classes: only {names[0]!r}; with one class every image is answered with it")
    return names


def print_unreadable(found: Evaluation) -> None:
    """Say which images were left out."""
    if found.unreadable:
        say(f"{len(found.unreadable)} of {len(found.unreadable) + len(found.labels)} images cannot be read:")
        for reason in found.unreadable:
            say(f"  {reason}")


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    plain = unprintable(text) is None  # else the same JSON in escapes: a file's name may hold anything
    typer.echo(text if plain else json.dumps(value, allow_nan=False))


def device_named(name: str) -> str:
    """The device to use: `auto` is the first GPU where there is one."""
    from dear.clip.factory import pick_device

    return pick_device(name)
