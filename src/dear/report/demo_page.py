"""The page that `dear demo` ends with: the heads, what adaptation gained and lost, what attributes see."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dear._io.files import write_atomic
from dear.heads.names import KIND_TITLES, KINDS
from dear.heads.roles import RoleMap
from dear.report import figures
from dear.report.headmap import KIND_MEANINGS, head_map
from dear.report.page import Table, Thumbnail, percent, render
from dear.report.run_page import TERMS


@dataclass(frozen=True)
class AccuracyRow:
    """One way to answer: accuracy on trained and on new classes, and their harmonic mean."""

    title: str
    trained: float
    new: float
    harmonic_mean: float
    recommended_for: str = ""  #: "trained", "new" or "trained and new" classes


@dataclass(frozen=True)
class TaskFacts:
    """What happened on one task.

    Attributes:
        name: of the task.
        classes: numbers of trained and of new classes.
        shots: training images per class.
        seconds: of training.
        rows: ways to answer.
        weights: fusion weights.
        fixed: test images of trained classes that zero-shot answered wrongly and the adapted model rightly.
        broken: the other way round.
        counts: how many images were fixed and broken in all.
    """

    name: str
    classes: tuple[int, int]
    shots: int
    seconds: float
    rows: tuple[AccuracyRow, ...]
    weights: Mapping[str, float]
    fixed: tuple[Thumbnail, ...]
    broken: tuple[Thumbnail, ...]
    counts: tuple[int, int]


@dataclass(frozen=True)
class DemoFacts:
    """Everything the page shows.

    Attributes:
        roles: the role map.
        tasks: what happened on each task.
        query: the query of the retrieval.
        found: attribute -> the images most similar to the query in it.
    """

    roles: RoleMap
    tasks: tuple[TaskFacts, ...]
    query: Thumbnail
    found: Mapping[str, tuple[Thumbnail, ...]]


def write_demo_page(path: str | os.PathLike[str], facts: DemoFacts) -> None:
    """Write the page to the file `path`, whole or not at all."""
    write_atomic(path, demo_page(facts))


def demo_page(facts: DemoFacts) -> str:
    """The page as HTML text."""
    terms = {
        **TERMS,
        "harmonic mean": "of the accuracies on trained and new classes; high only when both are",
        "token": "a vector that a tower reads beside the patches of an image; DeAR learns one per attribute",
    }
    return render(
        "demo.html",
        title="dear: adapting a CLIP head by head",
        facts=facts,
        terms=terms,
        kinds={KIND_TITLES[kind]: KIND_MEANINGS[kind] for kind in KINDS},
        map=head_map(facts.roles),
        tasks=[(task, _figure(task.rows), _table(task.rows), _weights(task)) for task in facts.tasks],
    )


def _figure(rows: Sequence[AccuracyRow]) -> object:
    names = {row: row.title.removeprefix("DeAR, ") for row in rows}
    return figures.accuracy_bars(
        {
            "trained classes": {names[row]: row.trained for row in rows},
            "new classes": {names[row]: row.new for row in rows},
            "harmonic mean": {names[row]: row.harmonic_mean for row in rows},
        }
    )


def _table(rows: Sequence[AccuracyRow]) -> Table:
    frozen = rows[0]
    texts = []
    for row in rows:
        name = (
            f"{row.title} (recommended for {row.recommended_for} classes)"
            if row.recommended_for
            else row.title
        )
        cells = [(row.trained, frozen.trained), (row.new, frozen.new)]
        shown = [
            percent(value) + ("" if row is frozen else f" ({100 * (value - old):+.1f})")
            for value, old in cells
        ]
        texts.append((name, *shown, percent(row.harmonic_mean)))
    return Table(
        ("mode (points against zero-shot)", "trained classes", "new classes", "harmonic mean"),
        tuple(texts),
        classes=tuple("best" if row.recommended_for else "" for row in rows),
    )


def _weights(task: TaskFacts) -> object:
    return figures.fusion_weights(task.weights)
