"""The parts of the demo that are workflows: adapt and examine, audit and repair, explain, focus."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dear.clip.model import Clip
from dear.data import halves, open_data
from dear.data.images import ImageSet, group_names
from dear.heads.roles import RoleMap
from dear.report.page import Thumbnail, thumbnail
from dear.runs.evaluation import Evaluation
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.shortcuts.without import Without
from dear.tasks.audit.task import audit
from dear.tasks.demo.facts import FocusFacts, ShortcutFacts, TaskFacts
from dear.tasks.evaluate import evaluate
from dear.tasks.explain.explanation import Explanation
from dear.tasks.explain.task import explainer_of
from dear.tasks.repair import repair
from dear.tasks.run_report.examine import examine
from dear.tasks.run_report.facts import Compared
from dear.train.fit import fit
from dear.train.setup.prepare import prepare
from dear.world.tasks import find_task

PrintLine = Callable[[str], None]  #: shows a line to the reader
SHOTS, SEED = 16, 1
SHORTCUT, CONCEPT = "world:shortcut-place", "Location"
FOCUS, FOCUS_ROLE = "world:scenes", "Location"


@dataclass(frozen=True)
class Size:
    """How much the demo does."""

    tasks: tuple[str, ...] = ("textures", "emblems")  #: tasks to adapt to
    epochs: int = 5  #: of training
    views: int = 3  #: random views per training image
    test_images: int = 25  #: of each class
    role_images: int = 1500  #: images that roles are discovered on
    known_images: int = 600  #: images whose attributes are known, for the truth about heads and for retrieval
    per_group: int = 6  #: test images per class and place of the shortcut
    focus_draws: int = 2  #: draws of one image per place
    focus_images: int = 12  #: test images per place


QUICK = Size(("textures",), 2, 1, 10, 400, 120, per_group=2, focus_draws=1, focus_images=4)


class TimedParts:
    """Measures the seconds of each part of a demo; notices of the tasks inside are not shown."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Measure what is done within this context."""
        start, log = time.monotonic(), logging.getLogger("dear")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)
        self.seconds[part] = round(time.monotonic() - start, 1)


def adapt_task(clip: Clip, roles: RoleMap, name: str, run: Path, size: Size) -> TaskFacts:
    """Adapt DeAR to the first half of a task's classes and examine it on both halves.

    A run of an earlier demo with the same settings is continued or used as it is.
    """
    data, recipe = f"world:{name}", {"views": size.views, "epochs": size.epochs}
    test = open_data(data, "test")
    spec = Spec(classes=halves(test.classes)[0], shots=SHOTS, seed=SEED, recipe=recipe, calibrate=False)
    model = fit(prepare(spec.changed(data=data), clip=clip, roles=roles), run, resume=True)
    facts = examine(model, _first(test, test.labels.tolist(), size.test_images), among_all=False)
    return TaskFacts(name, find_task(name).about, SHOTS, model.seconds, facts)


def _first(images: ImageSet, groups: Sequence[int | str], count: int) -> ImageSet:
    """The first `count` images of each group."""
    rows: dict[int | str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return images.subset(sorted(row for label_rows in rows.values() for row in label_rows[:count]))


def shortcut_parts(
    clip: Clip, roles: RoleMap, run: Path, size: Size
) -> tuple[ShortcutFacts, dict[str, Explanation]]:
    """A linear probe of animals at a place of their own each: audited, repaired, and two answers explained.

    A run of an earlier demo with the same settings is used as it is.
    """
    spec = Spec(method="linear-probe", shots=SHOTS, seed=SEED, calibrate=False)
    model = fit(prepare(spec.changed(data=SHORTCUT), clip=clip, roles=roles), run, resume=True)
    test = open_data(SHORTCUT, "test")
    test = _first(test, group_names(test) or (), size.per_group)
    audited = audit(run, backbone=clip, roles=roles, seed=SEED)
    fixed = repair(run, Without.of(CONCEPT.lower(), way="heads"), test=test, roles=roles, backbone=clip)
    assert fixed.comparison is not None
    before, after = evaluate(model, test), evaluate(fixed.trained, test)
    home = torch.tensor([name in set(group_names(audited.images) or ()) for name in before.groups or ()])
    facts = ShortcutFacts(
        images=len(audited.images),
        groups=len(set(before.groups or ())),
        findings=audited.concepts,
        concept=CONCEPT,
        heads=len(roles.select(concept=CONCEPT)),
        untouched=fixed.comparison.untouched,
        repaired=fixed.comparison.repaired,
        random=fixed.comparison.random,
        at_home=(_share(before, home), _share(after, home)),
        examples=tuple(_example(audited.images, label) for label in range(len(audited.images.classes))),
        compared=Compared(test, after, before, after.pick(None)),
    )
    return facts, _explain_two(model, test, before, home)


def _share(evaluation: Evaluation, rows: torch.Tensor) -> float:
    """Accuracy on some rows."""
    return float((evaluation.answers[evaluation.pick(None)] == evaluation.labels)[rows].double().mean())


def _explain_two(
    model: Model, test: ImageSet, evaluation: Evaluation, home: torch.Tensor
) -> dict[str, Explanation]:
    """Why the first right answer at a place of training, and why the first wrong one, are as they are."""
    right = evaluation.answers[evaluation.pick(None)] == evaluation.labels
    rows = [int(chosen.nonzero()[0]) for chosen in (right & home, ~right) if bool(chosen.any())]
    explainer = explainer_of(model)
    names = [(evaluation.groups or ())[row] for row in rows]
    titles = [f"{'Right' if right[row] else 'Wrong'}: {name}" for row, name in zip(rows, names, strict=True)]
    return dict(zip(titles, explainer.explain(test.subset(rows)), strict=True))


def _example(images: ImageSet, label: int) -> Thumbnail:
    """The first training image of a class."""
    row = int((images.labels == label).nonzero()[0])
    name = (group_names(images) or ())[row]
    return Thumbnail(thumbnail(images.image(row)), name, (("name", name),))


def focus_facts(clip: Clip, roles: RoleMap, size: Size) -> FocusFacts:
    """Linear probes from one image per place: with the whole feature, its role's heads, and random heads."""
    test = open_data(FOCUS, "test")
    test = _first(test, test.labels.tolist(), size.focus_images)
    heads = len(roles.select("core", FOCUS_ROLE))
    ways = {
        "whole feature": (None, roles),
        f"whole feature and {heads} {FOCUS_ROLE} heads": (FOCUS_ROLE.lower(), roles),
        f"whole feature and {heads} random heads": (FOCUS_ROLE.lower(), roles.shuffled(SEED)),
    }
    accuracies = {}
    for title, (focus, role_map) in ways.items():
        probe = Spec(data=FOCUS, method="linear-probe", shots=1, focus=focus, calibrate=False)
        evaluations = [
            evaluate(fit(prepare(probe.changed(seed=SEED + draw), clip=clip, roles=role_map)), test)
            for draw in range(size.focus_draws)
        ]
        accuracies[title] = tuple(one.accuracy[one.pick(None)] for one in evaluations)
    return FocusFacts(FOCUS, FOCUS_ROLE, heads, len(test.classes), len(test), accuracies)
