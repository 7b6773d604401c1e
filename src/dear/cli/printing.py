"""What the commands print: results on standard output, notices and progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from dear.utils.progress import Progress, silent
from dear.utils.text import escape_control, first_unprintable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from dear.runs.evaluation import Evaluation
    from dear.runs.predictions import Predictions


def echo(text: str) -> None:
    """A line on standard output, without control characters."""
    typer.echo(escape_control(text))


def say(text: str) -> None:
    """A sentence for people on standard error, as it is: no markup, no wrapping, no control characters."""
    _stderr().print(escape_control(text), markup=False, highlight=False, soft_wrap=True)


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    plain = first_unprintable(text) is None  # else the same JSON in escapes: a file's name may hold anything
    typer.echo(text if plain else json.dumps(value, allow_nan=False))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str | Text]], title: str = "", labels: int = 1
) -> None:
    """A table; columns behind the first `labels` are aligned right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < labels else "right")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    Console().print(table)


def print_accuracy(evaluation: Evaluation, title: str) -> None:
    """An evaluation as a table with one row per class, and the accuracy of all modes below."""
    values = evaluation.to_dict()
    if "map" in values:
        _print_sets(values, title)
        return
    rows = [(name, f"{accuracy:.1%}") for name, accuracy in values["per_class"].items()]
    mode = f", mode {values['mode']}" if len(values["modes"]) > 1 else ""
    print_table(("class", "accuracy"), rows, title + mode)
    if "worst_group" in values:
        worst = values["worst_group"]
        group = f"{worst['group']} (of {worst['groups']} groups of class and value)"
        echo(f"worst group: {worst['accuracy']:.1%}, {group}")
    for name, accuracy in values["modes"].items():
        label = "accuracy" if name == "default" else f"accuracy, {name}"
        echo(f"{label}: {accuracy:.1%} of {values['images']} images")
    if "tree" in values:
        _print_tree(values["tree"])
    line = f"calibration error: {values['ece']:.1%}"
    if values["ece_trained"] is not None and values["ece_new"] is not None:
        line += f"; {values['ece_trained']:.1%} for trained classes, {values['ece_new']:.1%} for new ones"
    echo(line)


def _print_tree(tree: dict[str, Any]) -> None:
    """Accuracy by level of a tree of classes, from the top, and of the deepest certain nodes."""
    echo("accuracy by level, from the top: " + ", ".join(f"{value:.1%}" for value in tree["levels"]))
    named = ", ".join(f"{value:.1%}" for value in tree["named"])
    echo(
        f"nodes with at least {tree['certain']:.0%}: {tree['accuracy']:.1%} right; named by level: {named}; "
        f"none certain: {tree['unnamed']:.1%}"
    )


def _print_sets(values: dict[str, Any], title: str) -> None:
    """Figures of sets of labels: one row per class, mAP and F1 below."""
    ends = values["intervals"]
    rows = [
        (name, f"{value:.1%}", f"{ends[name][0]:.1%} to {ends[name][1]:.1%}")
        for name, value in values["per_class"].items()
    ]
    print_table(("class", "average precision", "90% interval"), rows, title)
    low, high = values["map_interval"]
    echo(
        f"mean average precision: {values['map']:.1%} ({low:.1%} to {high:.1%}) of {values['images']} images"
    )
    if "micro_f1" in values:
        echo(f"F1: {values['micro_f1']:.1%} micro, {values['macro_f1']:.1%} macro")
        echo(f"exact sets: {values['accuracy']:.1%}; calibration error: {values['ece']:.1%}")


def print_answers(predictions: Predictions, as_json: bool = False, lines: bool = False) -> None:
    """Answers for people; as one JSON object; or with `lines` as one JSON object per image."""
    if as_json:
        print_json({"predictions": predictions.plain()})
        return
    for row in predictions.plain() if lines else ():
        print_json(row)
    for answer in () if lines else predictions:
        if answer.error is not None:
            continue
        echo(answer.image)
        if answer.rejected:
            echo("  none of these; nearest:")
        if answer.node is not None and answer.node[0] != answer.classes[0][0]:
            echo(f"  {answer.node[1]:6.1%}  {answer.node[0]}; of its classes:")
        if answer.labels is not None:
            echo(f"  labels: {', '.join(answer.labels) or 'none of these'}")
        for name, probability in answer.classes:
            echo(f"  {probability:6.1%}  {name}")


def print_unreadable(evaluation: Evaluation) -> None:
    """Report images that were left out."""
    reasons = evaluation.unreadable
    if reasons:
        say(f"{len(reasons)} of {len(reasons) + len(evaluation.labels)} images could not be read:")
        for reason in reasons:
            say(f"  {reason}")


@contextmanager
def stages() -> Iterator[Progress]:
    """A bar for each named stage of long work on a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=_stderr(), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield report
