"""Cross-validation of a method within a given time, on held-out images and on left-out classes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from dear.methods.base import Method
from dear.train.crossval import (
    HeldOut,
    LeftOut,
    Trials,
    class_folds,
    fresh,
    held_out,
    held_parts,
    joined,
    left_out,
)
from dear.train.frozen import stages_of
from dear.train.run import Paused
from dear.workflows.verdict import Answers, Candidate

LEAST_STEPS = 20  #: a training of fewer says nothing about a method
_PROBE = 4  # steps whose time is measured
_VIEWS = 4  # random views per image, where the time allows
_VIEWS_SHARE = 0.2  # of a method's time that computing views may take
_SMALL_BATCH = 8  # of shortened trainings: more steps in the same time


@dataclass(frozen=True)
class Pace:
    """The time of a method's trainings, estimated from the first steps of one.

    Attributes:
        step_s: seconds of a step.
        steps: of one training on all images.
        batch: images of a step.
        folds: parts of which one is held out.
        turns: halves of the classes that are left out in turn; each costs a quarter of a training.
    """

    step_s: float
    steps: int
    batch: int
    folds: int
    turns: int

    @property
    def part_s(self) -> float:
        """Seconds of the training without one part of the images."""
        return self.step_s * self.steps * (self.folds - 1) / self.folds

    @property
    def turns_s(self) -> float:
        """Seconds of the trainings without some classes."""
        return 0.25 * self.turns * self.step_s * self.steps

    def share(self, seconds: float) -> float:
        """Share of its steps that each training may take so that one part and the turns fit; at most 1."""
        return min(1.0, seconds / max(1e-9, self.part_s + self.turns_s))


def try_quickly(method: Method, trials: Trials, named: Candidate, folds: int, seconds: float) -> Candidate:
    """Cross-validate a method whose trainings take a moment: every part, every turn."""
    began, learns = time.monotonic(), any(p.requires_grad for p in method.parameters())
    trials, missing = _with_stages(method, trials, seconds)
    if missing:
        return replace(named, skipped=_needs(missing))
    held = held_out(method, trials, folds)
    assert held is not None  # checked before any method is tried
    seconds = (time.monotonic() - began) / (folds - 1)
    new = _on_new(method, list(left_out(method, trials))) if method.open_classes else None
    return replace(
        named,
        trained=_answers(held.logits[named.mode], held.labels, held.rows),
        new=new,
        seconds=seconds,
        effort=f"{folds} of {folds} parts" + (f", {_steps(trials)} steps" if learns else ""),
    )


def try_in_time(method: Method, trials: Trials, named: Candidate, folds: int, seconds: float) -> Candidate:
    """Cross-validate a method that trains inside the towers, as well as `seconds` allow.

    The frozen stage of a few random views is computed once for all trainings. Then a few steps are timed.
    One part of the images is held out, and the classes in turn; every training is shortened where these
    would not fit; further parts follow while there is time.
    """
    limit = time.monotonic() + seconds
    if seconds <= 0:
        return replace(named, skipped="no time was left")
    trials, missing = _with_stages(method, trials, seconds)
    if missing:
        return replace(named, skipped=_needs(missing))
    turns = len(class_folds(len(method.classes), trials.recipe.seed)) if method.open_classes else 0
    full = paced(method, trials, folds, turns)
    trials, pace, left = _fitted(method, trials, full, limit)
    if pace.steps < LEAST_STEPS <= full.steps:
        return replace(named, skipped=_needs(full.part_s + full.turns_s - left))
    last = limit + seconds  # other programs may slow the machine down: then what is there must do
    trials = replace(trials, stop=lambda: time.monotonic() > last)
    held: list[HeldOut] = []
    turned: list[LeftOut] = []
    try:
        before, parts = time.monotonic(), held_parts(method, trials, folds)
        held.append(next(parts))
        each = time.monotonic() - before
        if turns:
            turned.extend(left_out(method, trials))
        while pace.steps == full.steps and len(held) < folds and time.monotonic() + each < limit:
            held.append(next(parts))
    except Paused:
        if time.monotonic() <= last:
            raise
        if not held:
            return replace(named, skipped="did not fit into the time")
    every = joined(held)
    short = pace.steps * trials.recipe.batch < full.steps * full.batch
    effort = f"{len(held)} of {folds} parts, {pace.steps} of {full.steps} steps"
    return replace(
        named,
        trained=_answers(every.logits[named.mode], every.labels, every.rows),
        new=_on_new(method, turned),
        seconds=full.step_s * full.steps,
        effort=effort + (f" of {pace.batch} images" if pace.batch < full.batch else ""),
        shortened=short,
    )


def paced(method: Method, trials: Trials, folds: int, turns: int) -> Pace:
    """Time a few training steps of a copy of the method."""
    recipe, steps = trials.recipe, _steps(trials)
    return Pace(_time_of_step(method, trials), steps, recipe.batch, folds, turns)


def _fitted(method: Method, trials: Trials, full: Pace, limit: float) -> tuple[Trials, Pace, float]:
    """The trials, shortened where they would not fit; how long they take, and how much time there is.

    Much shorter trainings take smaller batches: what counts then is the number of updates.
    """
    left = limit - time.monotonic()
    share = full.share(left)
    if share == 1:
        return trials, full, left
    recipe, pace = replace(trials.recipe, warmup_epochs=0), full
    if share < 0.5 and recipe.batch > _SMALL_BATCH:
        recipe = replace(recipe, batch=_SMALL_BATCH)
        pace = paced(method, replace(trials, recipe=recipe), full.folds, full.turns)
        left = limit - time.monotonic()
        share = pace.share(left)
    recipe = replace(recipe, epochs=min(recipe.epochs, math.floor(recipe.epochs * share)))
    trials = replace(trials, recipe=recipe)
    return trials, replace(pace, steps=_steps(trials)), left


def _needs(seconds: float) -> str:
    return f"needs about {max(1, math.ceil(seconds / 60))} min more"


def _with_stages(method: Method, trials: Trials, seconds: float) -> tuple[Trials, float]:
    """The trials with the frozen stage of as many views as take a small share of the time.

    Returns:
        With it, the seconds that are missing for a single view; 0: none.
    """
    if trials.stages is not None:
        return trials, 0.0
    before, few = time.monotonic(), trials.images.subset(range(min(16, len(trials.images))))
    stages_of(method, few, trials.recipe, 1)
    a_view = (time.monotonic() - before) / 2 * len(trials.images) / len(few)  # its own view is another
    if 2 * a_view > seconds:
        return trials, 2 * a_view - seconds
    views = max(1, min(_VIEWS, int(_VIEWS_SHARE * seconds / max(1e-9, a_view))))
    return replace(trials, stages=stages_of(method, trials.images, trials.recipe, views)), 0.0


def _time_of_step(method: Method, trials: Trials) -> float:
    """Seconds of a training step: the median of a few."""
    times: list[float] = []
    probe = replace(
        trials,
        progress=lambda step, steps: times.append(time.monotonic()),
        stop=lambda: len(times) > _PROBE,
    )
    try:
        probe.teach(fresh(method, method.classes, None, trials.recipe.seed), torch.arange(len(trials.images)))
    except Paused:
        if len(times) <= _PROBE:
            raise
    return statistics.median([b - a for a, b in pairwise(times)] or [0.0])


def _steps(trials: Trials) -> int:
    return trials.recipe.epochs * math.ceil(len(trials.images) / trials.recipe.batch)


def _answers(logits: Tensor, labels: Tensor, rows: Tensor) -> Answers:
    order = rows.argsort()
    return Answers((logits.argmax(dim=1) == labels)[order], rows[order])


def _on_new(method: Method, turns: Sequence[LeftOut]) -> Answers | None:
    """Right or wrong for images of left-out classes, answered among those, in the method's usual mode."""
    mode, found = method.modes[0], []
    for turn in turns:
        first = len(turn.trained)
        of_new = turn.labels >= first
        if len(turn.new) > 1:
            found.append((turn.logits[mode][of_new, first:], turn.labels[of_new] - first, turn.rows[of_new]))
    if not found:
        return None
    parts = [_answers(*one) for one in found]
    rows, right = torch.cat([p.rows for p in parts]), torch.cat([p.right for p in parts])
    order = rows.argsort()
    return Answers(right[order], rows[order])
