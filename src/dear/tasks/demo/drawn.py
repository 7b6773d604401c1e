"""The demo on the embedded backbone and world: what the tasks of the package find there, and a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dear.clip.factory import load
from dear.report.page import percent
from dear.tasks.audit.findings import SHORTCUT
from dear.tasks.demo.facts import DemoFacts, FocusFacts, RetrievalFacts, ShortcutFacts, TaskFacts
from dear.tasks.demo.heads import known_images, retrieval_facts, truth_rows
from dear.tasks.demo.page import shortcut_rows, write_demo_page
from dear.tasks.demo.parts import QUICK, PrintLine, Size, TimedParts, adapt_task, focus_facts, shortcut_parts
from dear.tasks.mini.measure import mini_roles
from dear.tasks.run_report.facts import Compared
from dear.utils.files import PathLike, check_output, write_json


def drawn_demo(out: PathLike, quick: bool = False, progress: PrintLine = print) -> DemoFacts:
    """The demo on drawn images; `out` then has `roles.json`, run folders, `results.json` and `index.html`.

    A second demo in the same folder uses the runs of the first. `quick` has one task and fewer images and
    epochs, to see that everything works; `progress` is called with lines for the reader.
    """
    check_output(out, folder=True)
    folder, size, part = Path(out), QUICK if quick else Size(), TimedParts()
    end = "-quick" if quick else ""
    clip = load("mini")
    parameters = sum(p.numel() for p in clip.parameters())
    progress(f"mini: a CLIP of {parameters / 1e6:.1f} million parameters, trained on drawn images only")
    progress("finding the roles of its heads (about half a minute)")
    with part("roles"):
        roles = mini_roles(clip, size.role_images)
        roles.save(folder / "roles.json")
        known = known_images(clip, roles, size.known_images)
        truth = truth_rows(known)
    tasks = []
    for name in size.tasks:
        with part(name):
            tasks.append(adapt_task(clip, roles, name, folder / f"run-{name}{end}", size))
        _print_task(progress, tasks[-1])
    progress("2. A shortcut. Six animals, in training each at one place; in the test everywhere")
    with part("shortcut"):
        shortcut, explained = shortcut_parts(clip, roles, folder / f"run-shortcut{end}", size)
    _print_shortcut(progress, shortcut)
    progress("3. Why this answer")
    for title, one in explained.items():
        progress(f"   {title}: {one.sentence}")
    progress("4. What the heads do")
    counts = ", ".join(f"{number} {kind}" for kind, number in roles.counts().items())
    progress(f"   {len(roles)} heads in layers {roles.layers[0]}-{roles.layers[-1]}: {counts}")
    for row in truth:
        progress(
            f"   the {row.heads} {row.concept} heads: {row.concept.lower()} explains {percent(row.matching)} "
            f"of what they add to the feature, {percent(row.others)} in other heads"
        )
    with part("focus"):
        focus = focus_facts(clip, roles, size)
    _print_focus(progress, focus)
    with part("retrieval"):
        retrieval = retrieval_facts(known, roles)
    _print_retrieval(progress, retrieval)
    facts = DemoFacts(roles, truth, tuple(tasks), shortcut, explained, focus, retrieval, quick, part.seconds)
    write_json(folder / "results.json", results(facts))
    write_demo_page(folder / "index.html", facts)
    return facts


def _print_task(progress: PrintLine, task: TaskFacts) -> None:
    trained, new = len(task.run.classes), len(task.new.adapted.classes)
    progress(
        f"1. Adaptation. world:{task.name}, {trained} classes with {task.shots} images each, "
        f"{task.seconds:.0f} s of training; {new} classes are new"
    )
    for row in task.rows:
        progress(
            f"   {row.title:18} trained {row.trained:6.1%}   new {row.new:6.1%}   HM {row.harmonic_mean:6.1%}"
            + ("   <- the usual answer" if row.recommended else "")
        )


def _print_shortcut(progress: PrintLine, facts: ShortcutFacts) -> None:
    suspects = [one.association.concept for one in facts.findings if one.verdict == SHORTCUT]
    progress(f"   suspected by the audit: {', '.join(suspects) or 'nothing'}")
    for title, figures in shortcut_rows(facts):
        progress(f"   {title:36} worst group {figures['worst_group']:6.1%}   all {figures['accuracy']:6.1%}")


def _print_focus(progress: PrintLine, facts: FocusFacts) -> None:
    progress(
        f"5. Focus. {facts.data}, {facts.classes} places, one example of each; a linear probe learns from"
    )
    for title, accuracy in facts.means.items():
        progress(f"   {title:36} {accuracy:6.1%}")


def _print_retrieval(progress: PrintLine, facts: RetrievalFacts) -> None:
    count = f"{facts.neighbors} nearest of {facts.images} images"
    progress(f"6. Retrieval by heads: share of the {count} that have the query's value")
    for row in facts.rows:
        progress(
            f"   {row.concept:9} by its {row.heads} heads {row.by_heads:6.1%}"
            f"   by the whole feature {row.whole:6.1%}"
            f"   by random heads {row.random:6.1%}   chance {row.chance:6.1%}"
        )


def results(facts: DemoFacts) -> dict[str, Any]:
    """Every figure of the page, as plain values."""
    return {
        "quick": facts.quick,
        "seconds": dict(facts.seconds),
        "heads": [asdict(row) for row in facts.truth],
        "tasks": {
            task.name: {
                "rows": [{**asdict(row), "harmonic_mean": row.harmonic_mean} for row in task.rows],
                "fusion_weights": dict(task.run.fusion_weights),
                "seconds": task.seconds,
                "trained": _changes(task.trained),
                "new": _changes(task.new),
            }
            for task in facts.tasks
        },
        "shortcut": {
            "concepts": [
                {"concept": one.association.concept, "verdict": one.verdict, "sentence": one.sentence}
                for one in facts.shortcut.findings
            ],
            "untouched": dict(facts.shortcut.untouched),
            "repaired": dict(facts.shortcut.repaired),
            "random": [dict(draw) for draw in facts.shortcut.random],
            "at_home": list(facts.shortcut.at_home),
        },
        "explained": {title: one.sentence for title, one in facts.explained.items()},
        "focus": {name: list(draws) for name, draws in facts.focus.accuracies.items()},
        "retrieval": [asdict(row) for row in facts.retrieval.rows],
    }


def _changes(compared: Compared) -> dict[str, Any]:
    groups = compared.changes()
    classes = {name: [before, after] for name, before, after in compared.class_changes()}
    return {"fixed": len(groups["fixed"]), "broken": len(groups["broken"]), "classes": classes}
