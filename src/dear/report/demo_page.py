"""The page of `dear demo`: four claims, each with the figures measured for it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dear._io.files import write_atomic
from dear.heads.audit import ABOUT_CLASSES, ASSOCIATED, NONE, SHORTCUT, UNUSED
from dear.heads.names import KIND_TITLES, KINDS
from dear.report import figures
from dear.report.demo_facts import AccuracyRow, DemoFacts, RetrievalFacts, ShortcutFacts, TaskFacts, TruthRow
from dear.report.headmap import KIND_MEANINGS, head_map
from dear.report.page import Table, percent, render

TERMS = {
    "head": "one of the parallel attention units of a layer; each adds a vector to the image feature",
    "role": "the concept that a head's vectors describe, found from the phrases that explain them best",
    "trained classes": "the classes DeAR was trained on, here with 16 images each",
    "new classes": "classes it was not trained on; it knows only their names",
    "zero-shot": "the frozen model before adaptation: it compares an image with a prompt for each class",
    "fused": "the class token and all attribute tokens score together",
    "decoupled": "the class token scores alone",
    "token": "a vector that a tower reads beside the patches of an image; DeAR learns one per attribute",
    "accuracy": "the share of test images with the right answer; points are differences in percent",
    "harmonic mean": "of the accuracies on trained and on new classes; high only when both are",
    "worst group": "the pair of class and place with the lowest accuracy",
}
"""Words of the page, in the order in which they are explained."""

_VERDICTS = {
    SHORTCUT: "suspected shortcut",
    ASSOCIATED: "goes with the classes",
    UNUSED: "goes with the classes, not used",
    ABOUT_CLASSES: "what the classes are about",
    NONE: "does not go with the classes",
}


def write_demo_page(path: str | os.PathLike[str], facts: DemoFacts) -> None:
    """Write the page to the file `path`, whole or not at all."""
    write_atomic(path, demo_page(facts))


def demo_page(facts: DemoFacts) -> str:
    """The page as HTML text."""
    return render(
        "demo.html",
        title="dear: adapting a CLIP head by head",
        facts=facts,
        terms=TERMS,
        tiles=_tiles(facts),
        kinds={KIND_TITLES[kind]: KIND_MEANINGS[kind] for kind in KINDS},
        map=head_map(facts.roles),
        truth=_truth(facts.truth),
        tasks=[_task(task) for task in facts.tasks],
        shortcut=_shortcut(facts.shortcut),
        concepts=_concepts(facts.shortcut),
        precision=_precision(facts.retrieval),
        precision_figure=_precision_figure(facts.retrieval),
    )


def _tiles(facts: DemoFacts) -> list[tuple[str, str]]:
    """The main figure of each part."""
    tiles = []
    if facts.truth:
        best = max(facts.truth, key=lambda row: row.own - row.others)
        tiles.append(
            (
                percent(best.own),
                f"of what the {best.heads} {best.concept} heads add is explained by the image's "
                f"{best.concept.lower()}; other heads: {percent(best.others)}",
            )
        )
    for task in facts.tasks:
        frozen, used = task.rows[0], _used(task)
        tiles.append(
            (
                percent(used.harmonic_mean),
                f"harmonic mean on {task.name} after adaptation; zero-shot: {percent(frozen.harmonic_mean)}",
            )
        )
    before, after = facts.shortcut.rows[0], facts.shortcut.repaired
    tiles.append(
        (
            percent(after.worst),
            f"in the worst group without the shortcut's heads; before: {percent(before.worst)}",
        )
    )
    if facts.retrieval.rows:
        top = max(facts.retrieval.rows, key=lambda row: row.by_heads - row.random)
        tiles.append(
            (
                percent(top.by_heads),
                f"of the images found by the {top.concept} heads are right; by random heads: "
                f"{percent(top.random)}",
            )
        )
    return tiles


def _used(task: TaskFacts) -> AccuracyRow:
    return next(row for row in task.rows if row.recommended)


def _truth(rows: Sequence[TruthRow]) -> Table:
    return Table(
        ("attribute", "heads with this role", "explained in these heads", "explained in all other heads"),
        tuple((row.concept, str(row.heads), percent(row.own), percent(row.others)) for row in rows),
    )


def _task(task: TaskFacts) -> dict[str, object]:
    """What the template shows of one task."""
    frozen, used = task.rows[0], _used(task)
    names = {row: row.title.removeprefix("DeAR, ") for row in task.rows}
    bars = figures.accuracy_bars(
        {
            "trained classes": {names[row]: row.trained for row in task.rows},
            "new classes": {names[row]: row.new for row in task.rows},
            "harmonic mean": {names[row]: row.harmonic_mean for row in task.rows},
        }
    )
    worse = [
        (f"{name} ({'trained' if part is task.trained else 'new'})", percent(before), percent(after))
        for part in (task.trained, task.new)
        for name, before, after in part.worse
    ]
    return {
        "facts": task,
        "frozen": frozen,
        "used": used,
        "bars": bars,
        "table": _accuracies(task.rows),
        "worse": Table(("class", "zero-shot", "DeAR, fused"), tuple(worse)),
        "weights": figures.fusion_weights(task.weights),
    }


def _accuracies(rows: Sequence[AccuracyRow]) -> Table:
    frozen, texts = rows[0], []
    for row in rows:
        pairs = (
            (row.trained, frozen.trained),
            (row.new, frozen.new),
            (row.harmonic_mean, frozen.harmonic_mean),
        )
        cells = [
            percent(now) + ("" if row is frozen else f" ({100 * (now - old):+.1f})") for now, old in pairs
        ]
        texts.append((row.title + (" (recommended)" if row.recommended else ""), *cells))
    return Table(
        ("answer (points against zero-shot)", "trained classes", "new classes", "harmonic mean"),
        tuple(texts),
        classes=tuple("best" if row.recommended else "" for row in rows),
    )


def _shortcut(facts: ShortcutFacts) -> Table:
    texts = []
    for row in facts.rows:
        worst = percent(row.worst)
        if row.spread is not None:
            worst += f" ({percent(row.spread[0])} to {percent(row.spread[1])})"
        texts.append((row.title, worst, percent(row.everywhere), percent(row.at_home)))
    return Table(
        ("classifier with", "worst group", "all test images", "animals at their place of training"),
        tuple(texts),
        classes=tuple("best" if row.recommended else "" for row in facts.rows),
    )


def _concepts(facts: ShortcutFacts) -> Table:
    return Table(
        ("concept", "verdict", "association with the classes", "by chance"),
        tuple(
            (row.concept, _VERDICTS[row.verdict], f"{row.information:.2f}", f"{row.expected:.2f}")
            for row in facts.concepts
        ),
        labels=2,
        classes=tuple("best" if row.verdict == SHORTCUT else "" for row in facts.concepts),
    )


def _precision(facts: RetrievalFacts) -> Table:
    return Table(
        ("alike in", "by its heads", "by the whole feature", "by as many random heads", "chance"),
        tuple(
            (
                f"{row.concept} ({row.heads} heads)",
                *(percent(value) for value in (row.by_heads, row.whole, row.random, row.chance)),
            )
            for row in facts.rows
        ),
    )


def _precision_figure(facts: RetrievalFacts) -> object:
    return figures.accuracy_bars(
        {
            row.concept: {
                "heads": row.by_heads,
                "whole feature": row.whole,
                "random heads": row.random,
                "chance": row.chance,
            }
            for row in facts.rows
        }
    )
