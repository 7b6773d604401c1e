"""The page of `dear demo`: six claims, each with the figures measured for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from dear.report import figures
from dear.report.head_map import head_map, kind_meanings
from dear.report.page import MODE_TERMS, Table, percent, render
from dear.tasks.audit.findings import SHORTCUT
from dear.tasks.demo.facts import (
    AccuracyRow,
    DemoFacts,
    FocusFacts,
    RetrievalFacts,
    ShortcutFacts,
    TaskFacts,
)
from dear.tasks.explain.page import explanation_values
from dear.tasks.run_report.facts import Compared
from dear.tasks.run_report.page import gallery, spread_rows
from dear.utils.files import write_atomic

TERMS = {
    "head": "one of the parallel attention units of a layer; each adds a vector to the image feature",
    "role": "the concept that a head's vectors describe, found from the phrases that explain them best",
    "trained classes": "the classes DeAR was trained on, here with 16 images each",
    "new classes": "classes it was not trained on; it knows only their names",
    "zero-shot": "the frozen model before adaptation: it compares an image with a prompt for each class",
    **{mode: MODE_TERMS[mode] for mode in ("fused", "decoupled")},
    "token": "a vector that a tower reads next to the patches of an image; DeAR learns one per attribute",
    "accuracy": "the share of test images with the right answer; points are differences in percent",
    "harmonic mean": "of the accuracies on trained and on new classes; high only when both are",
    "worst group": "the pair of class and place with the lowest accuracy",
}
"""Words of the page, in the order in which they are explained."""

CHANGED = 5  #: images in a row whose answers changed


def write_demo_page(path: str | os.PathLike[str], facts: DemoFacts) -> None:
    """Write the page to the file `path`, whole or not at all."""
    write_atomic(path, demo_page(facts))


def demo_page(facts: DemoFacts) -> str:
    """The page as HTML text."""
    return render(
        "demo.html",
        title="dear: adapting a CLIP head by head",
        facts=facts,
        explained=[explanation_values(one, title) for title, one in facts.explained.items()],
        terms=TERMS,
        tiles=_tiles(facts),
        kinds=kind_meanings(),
        map=head_map(facts.roles),
        truth=Table(
            ("attribute", "heads with this role", "explained in these heads", "explained in all other heads"),
            tuple(
                (row.concept, str(row.heads), percent(row.matching), percent(row.others))
                for row in facts.truth
            ),
        ),
        tasks=[_task(task) for task in facts.tasks],
        shortcut=_shortcut(facts.shortcut),
        concepts=_concepts(facts.shortcut),
        now_right=_changed_images(facts.shortcut.compared)["fixed"],
        focus=_focus(facts.focus),
        focus_figure=figures.accuracy_bars(
            {
                "one image per place": dict(
                    zip(("whole feature", "heads", "random heads"), facts.focus.means.values(), strict=True)
                )
            }
        ),
        precision=_precision(facts.retrieval),
        precision_figure=figures.accuracy_bars({row.concept: row.ways for row in facts.retrieval.rows}),
    )


def _tiles(facts: DemoFacts) -> list[tuple[str, str]]:
    """The main figure of each part."""
    tiles = []
    if facts.truth:
        best = max(facts.truth, key=lambda row: row.matching - row.others)
        words = f"of what the {best.heads} {best.concept} heads add is explained by the image's "
        words += f"{best.concept.lower()}; other heads: {percent(best.others)}"
        tiles.append((percent(best.matching), words))
    for task in facts.tasks:
        words = f"harmonic mean on {task.name} after adaptation; zero-shot: "
        words += percent(task.rows[0].harmonic_mean)
        tiles.append((percent(task.used.harmonic_mean), words))
    before, after = (part["worst_group"] for part in (facts.shortcut.untouched, facts.shortcut.repaired))
    tiles.append(
        (percent(after), f"in the worst group without the shortcut's heads; before: {percent(before)}")
    )
    whole, focused, _ = facts.focus.means.values()
    words = f"from one image per place, with the {facts.focus.role} heads; without: {percent(whole)}"
    tiles.append((percent(focused), words))
    if facts.retrieval.rows:
        top = max(facts.retrieval.rows, key=lambda row: row.by_heads - row.random)
        words = f"of the images found by the {top.concept} heads are right; by random heads: "
        tiles.append((percent(top.by_heads), words + percent(top.random)))
    return tiles


def _task(task: TaskFacts) -> dict[str, object]:
    """What the template shows of one task."""
    names = {row: row.title.rpartition(", ")[2] for row in task.rows}
    bars = figures.accuracy_bars(
        {
            "trained classes": {names[row]: row.trained for row in task.rows},
            "new classes": {names[row]: row.new for row in task.rows},
            "harmonic mean": {names[row]: row.harmonic_mean for row in task.rows},
        }
    )
    worse = [
        (f"{name} ({kind})", percent(before), percent(after))
        for kind, part in (("trained", task.trained), ("new", task.new))
        for name, before, after in part.class_changes()
        if after < before
    ]
    return {
        "facts": task,
        "frozen": task.rows[0],
        "used": task.used,
        "bars": bars,
        "table": _accuracies(task.rows),
        "parts": {"trained": _changed_images(task.trained), "new": _changed_images(task.new)},
        "worse": Table(("class", "zero-shot", task.used.title), tuple(worse)),
        "weights": figures.fusion_weights(task.run.fusion_weights),
    }


def _changed_images(compared: Compared) -> dict[str, object]:
    """How many images were fixed and broken, and a few of them."""
    groups = compared.changes()
    return {
        "counts": (len(groups["fixed"]), len(groups["broken"])),
        **{
            name: gallery(compared, spread_rows(groups[name], CHANGED), "before")
            for name in ("fixed", "broken")
        },
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
        ("answer (points compared with zero-shot)", "trained classes", "new classes", "harmonic mean"),
        tuple(texts),
        classes=tuple("best" if row.recommended else "" for row in rows),
    )


def shortcut_rows(facts: ShortcutFacts) -> list[tuple[str, Mapping[str, float]]]:
    """What was removed, and the figures of the classifier then."""
    return [
        ("nothing removed", facts.untouched),
        (f"the {facts.heads} {facts.concept} heads removed", facts.repaired),
        (f"{facts.heads} random heads removed ({len(facts.random)} draws)", facts.random_mean),
    ]


def _shortcut(facts: ShortcutFacts) -> Table:
    rows = [
        (title, percent(figures["worst_group"]), percent(figures["accuracy"]))
        for title, figures in shortcut_rows(facts)
    ]
    worst = [draw["worst_group"] for draw in facts.random]
    spread = f" ({percent(min(worst))} to {percent(max(worst))})"
    rows[-1] = (rows[-1][0], rows[-1][1] + spread, rows[-1][2])
    return Table(("classifier with", "worst group", "all test images"), tuple(rows), classes=("", "best", ""))


def _concepts(facts: ShortcutFacts) -> Table:
    return Table(
        ("concept", "verdict", "association with the classes", "by chance"),
        tuple(
            (
                one.association.concept,
                one.title,
                f"{one.association.information:.2f}",
                f"{one.association.expected:.2f}",
            )
            for one in facts.findings
        ),
        labels=2,
        classes=tuple("best" if one.verdict == SHORTCUT else "" for one in facts.findings),
    )


def _focus(facts: FocusFacts) -> Table:
    return Table(
        ("a linear probe learns from", "accuracy", "each draw"),
        tuple(
            (name, percent(facts.means[name]), ", ".join(percent(draw) for draw in draws))
            for name, draws in facts.accuracies.items()
        ),
        classes=("", "best", ""),
    )


def _precision(facts: RetrievalFacts) -> Table:
    return Table(
        ("alike in", "by its heads", "by the whole feature", "by as many random heads", "chance"),
        tuple(
            (f"{row.concept} ({row.heads} heads)", *(percent(value) for value in row.ways.values()))
            for row in facts.rows
        ),
    )
