"""The demo on the embedded backbone and world: roles, adaptation, a shortcut removed, retrieval, a page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dear._io.files import write_json
from dear.clip.factory import load
from dear.heads.roles import RoleMap
from dear.report.demo_facts import DemoFacts, RetrievalFacts, ShortcutFacts, TaskFacts, TruthRow
from dear.workflows.demo_parts import (
    QUICK,
    Size,
    adapt_task,
    known_images,
    retrieval_facts,
    shortcut_facts,
    truth_rows,
)
from dear.world.measure import mini_roles

Tell = Callable[[str], None]


def demo(out: str | Path, quick: bool = False, tell: Tell = print) -> DemoFacts:
    """Run the demo; `out` then has `roles.json`, a run folder per task, `results.json` and `index.html`.

    Every file is written whole or not at all. A second demo in the same folder uses the runs of the first.

    Args:
        out: folder to write.
        quick: one task, fewer images and epochs, to see that everything works.
        tell: called with sentences for the reader.
    """
    from dear.report.demo_page import write_demo_page

    folder, size, clock = Path(out), QUICK if quick else Size(), _Clock()
    clip = load("mini")
    parameters = sum(p.numel() for p in clip.parameters())
    tell("1. What the heads do: finding the roles of the heads of mini, a CLIP of")
    tell(f"   {parameters / 1e6:.1f} million parameters that was trained on drawn images only")
    with clock("roles"):
        roles = mini_roles(clip, size.role_images)
        roles.save(folder / "roles.json")
        known = known_images(clip, roles, size.known_images)
        truth = truth_rows(known, roles)
    _tell_roles(tell, roles, truth)
    tasks = []
    for name in size.tasks:
        run = folder / (f"run-{name}-quick" if quick else f"run-{name}")
        with clock(name):
            tasks.append(adapt_task(clip, roles, name, run, size))
        _tell_task(tell, tasks[-1])
    with clock("shortcut"):
        shortcut = shortcut_facts(clip, roles, size.per_group)
    _tell_shortcut(tell, shortcut)
    with clock("retrieval"):
        retrieval = retrieval_facts(known, roles)
    _tell_retrieval(tell, retrieval)
    facts = DemoFacts(roles, truth, tuple(tasks), shortcut, retrieval, quick, clock.seconds)
    write_json(folder / "results.json", results(facts))
    write_demo_page(folder / "index.html", facts)
    return facts


class _Clock:
    """Seconds per part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[part] = round(time.monotonic() - start, 1)


def _tell_roles(tell: Tell, roles: RoleMap, truth: Sequence[TruthRow]) -> None:
    counts = ", ".join(f"{number} {kind}" for kind, number in roles.counts().items())
    tell(f"   {len(roles)} heads in layers {roles.layers[0]}-{roles.layers[-1]}: {counts}")
    for row in truth:
        tell(
            f"   the {row.heads} {row.concept} heads: {row.concept.lower()} explains {row.own:.0%} of what "
            f"they add to the feature, {row.others:.0%} in other heads"
        )


def _tell_task(tell: Tell, task: TaskFacts) -> None:
    tell(
        f"2. Adaptation. world:{task.name}, {task.classes[0]} classes with {task.shots} images each, "
        f"{task.seconds:.0f} s of training; {task.classes[1]} classes are new"
    )
    for row in task.rows:
        tell(
            f"   {row.title:18} trained {row.trained:6.1%}   new {row.new:6.1%}   HM {row.harmonic_mean:6.1%}"
            + ("   <- the usual answer" if row.recommended else "")
        )


def _tell_shortcut(tell: Tell, facts: ShortcutFacts) -> None:
    tell("3. A shortcut. Six animals, in training each at a place of its own; in the test everywhere")
    suspects = [row.concept for row in facts.concepts if row.verdict == "shortcut"]
    tell(f"   suspected in the training images: {', '.join(suspects) or 'nothing'}")
    for row in facts.rows:
        tell(f"   {row.title:36} worst group {row.worst:6.1%}   all {row.everywhere:6.1%}")


def _tell_retrieval(tell: Tell, facts: RetrievalFacts) -> None:
    count = f"{facts.neighbors} nearest of {facts.images} images"
    tell(f"4. Retrieval by heads: share of the {count} that have the query's value")
    for row in facts.rows:
        tell(
            f"   {row.concept:9} by its {row.heads} heads {row.by_heads:4.0%}"
            f"   by the whole feature {row.whole:4.0%}"
            f"   by random heads {row.random:4.0%}   chance {row.chance:4.0%}"
        )


def results(facts: DemoFacts) -> dict[str, Any]:
    """Every figure of the page, as plain values."""
    return {
        "quick": facts.quick,
        "seconds": dict(facts.seconds),
        "heads": [asdict(row) for row in facts.truth],
        "tasks": {
            task.name: {
                "rows": [asdict(row) for row in task.rows],
                "fusion_weights": dict(task.weights),
                "seconds": task.seconds,
                "trained": _plain(task.trained.counts, task.trained.classes),
                "new": _plain(task.new.counts, task.new.classes),
            }
            for task in facts.tasks
        },
        "shortcut": {
            "concepts": [asdict(row) for row in facts.shortcut.concepts],
            "rows": [asdict(row) for row in facts.shortcut.rows],
        },
        "retrieval": [asdict(row) for row in facts.retrieval.rows],
    }


def _plain(counts: tuple[int, int], classes: tuple[tuple[str, float, float], ...]) -> dict[str, Any]:
    return {"fixed": counts[0], "broken": counts[1], "classes": {name: [a, b] for name, a, b in classes}}
