"""Cross-validation of a method within a given time, on held-out images and on left-out classes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from dear._io.progress import Progress
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
from dear.workflows.verdict import Answers, Candidate, better

LEAST_STEPS = 20  #: a training of fewer says nothing about a method
PUT_OFF = 4.0  #: a method that needs so many times longer than the quickest waits until the others are done
LEAST_SHARE = 1 / 3  #: of its steps that such a method must be able to take
_PROBE = 4  # steps whose time is measured
_PROBE_S = 2.0  # seconds after which fewer will do
_VIEWS = 4  # random views per image, where the time allows
_VIEWS_SHARE = 0.2  # of a method's time that computing views may take
_NEARLY = 0.9  # of the time that a training needs: it is not shortened for the rest
_LOST = 0.02  # chance that a method which lost so clearly is as good: it gets no further time


@dataclass(frozen=True)
class Pace:
    """The time of a method's trainings, estimated from the first steps of one.

    Attributes:
        step_s: seconds of a step.
        steps: of one training on all images.
        folds: parts of which one is held out.
        turns: halves of the classes that are left out in turn; each costs a quarter of a training.
    """

    step_s: float
    steps: int
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

    @property
    def needs(self) -> float:
        """Seconds of both: what it takes to try a method in full."""
        return self.part_s + self.turns_s

    def share(self, seconds: float) -> float:
        """Share of its steps that each training may take so that one part and the turns fit; at most 1."""
        share = seconds / max(1e-9, self.needs)
        return 1.0 if share >= _NEARLY else share


class Attempt:
    """A method that is tried within a time that it shares with others.

    One whose trainings take a moment holds out every part, and the classes in turn (`quickly`). One that
    trains inside the towers goes step by step: the frozen stage of a few random views is computed once for
    all trainings, and a few steps are timed (`prepare`). One part of the images is held out, and the classes
    in turn; every training is shortened where these would not fit (`first`). Further parts follow (`more`).

    Args:
        method: untrained.
        trials: on what and how it is trained.
        named: its name in the table.
        folds: parts of the images.
    """

    def __init__(self, method: Method, trials: Trials, named: Candidate, folds: int) -> None:
        self.method, self.trials, self.named, self.folds = method, trials, named, folds
        self.skipped: str | None = None
        self.full = self.pace = Pace(0.0, 0, folds, 0)
        self._held: list[HeldOut] = []
        self._turned: list[LeftOut] = []
        self._each = 0.0
        self._quick: Candidate | None = None

    def quickly(self, seconds: float) -> None:
        """Hold out every part and the classes in turn; skipped where a view of the images takes too long."""
        began, method = time.monotonic(), self.method
        trials, missing = _with_stages(method, self.trials, seconds)
        if missing:
            self.skipped = _needs(missing)
            return
        held = held_out(method, trials, self.folds)
        assert held is not None  # checked before any method is tried
        seconds = (time.monotonic() - began) / (self.folds - 1)
        learns = any(p.requires_grad for p in method.parameters())
        self._quick = replace(
            self.named,
            trained=_answers(held.logits[self.named.mode], held.labels, held.rows),
            new=_on_new(method, list(left_out(method, trials))) if method.open_classes else None,
            seconds=seconds,
            effort=f"{self.folds} of {self.folds} parts" + (f", {_steps(trials)} steps" if learns else ""),
        )

    def prepare(self, seconds: float) -> None:
        """Compute views and time a few steps, within some seconds."""
        if seconds <= 0:
            self.skipped = "no time was left"
            return
        self.trials, missing = _with_stages(self.method, self.trials, seconds)
        if missing:
            self.skipped = _needs(missing)
            return
        turns = len(class_folds(len(self.method.classes), self.trials.recipe.seed))
        self.full = self.pace = measure_pace(
            self.method, self.trials, self.folds, turns if self.method.open_classes else 0
        )

    def first(self, seconds: float, least: float = 0.0) -> None:
        """Hold out one part and the classes in turn; skipped where less than a share of the steps fits."""
        share = self.full.share(max(0.0, seconds))
        recipe = self.trials.recipe
        if share < 1:
            recipe = replace(recipe, warmup_epochs=0, epochs=math.floor(recipe.epochs * share))
        steps = recipe.epochs * math.ceil(len(self.trials.images) / recipe.batch)
        if share < least or steps < LEAST_STEPS <= self.full.steps:
            self.skipped = _needs(self.full.needs - seconds)
            return
        self.trials, self.pace = replace(self.trials, recipe=recipe), replace(self.full, steps=steps)
        last = time.monotonic() + 2 * seconds  # others may slow the machine down: then what is there must do
        trials = replace(self.trials, stop=lambda: time.monotonic() > last)
        try:
            before = time.monotonic()
            self._held.append(next(held_parts(self.method, trials, self.folds)))
            self._each = time.monotonic() - before
            if self.full.turns:
                self._turned.extend(left_out(self.method, trials))
        except Paused:
            if time.monotonic() <= last:
                raise
            if not self._held:
                self.skipped = "did not fit into the time"

    def more(self, deadline: float) -> None:
        """Hold out one more part, where it fits; shortened trainings get none."""
        done = len(self._held)
        if not 0 < done < self.folds or self.shortened or time.monotonic() + self._each > deadline:
            return
        self._held.append(next(held_parts(self.method, self.trials, self.folds, start=done)))

    @property
    def shortened(self) -> bool:
        """Whether its trainings have fewer steps than usual."""
        return self.pace.steps < self.full.steps

    def result(self) -> Candidate:
        """What was found so far."""
        if self.skipped is not None:
            return replace(self.named, skipped=self.skipped)
        if self._quick is not None:
            return self._quick
        every, pace, full = joined(self._held), self.pace, self.full
        return replace(
            self.named,
            trained=_answers(every.logits[self.named.mode], every.labels, every.rows),
            new=_on_new(self.method, self._turned),
            seconds=full.step_s * full.steps,
            effort=f"{len(self._held)} of {self.folds} parts, {pace.steps} of {full.steps} steps",
            shortened=self.shortened,
        )


def try_all(
    attempts: Sequence[Attempt], deadline: float, progress: Progress | None = None
) -> list[Candidate]:
    """Try methods until a time (of `time.monotonic`): those first whose trainings take a moment."""
    done = 0

    def tried() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress("methods", done, len(attempts))

    if progress is not None:
        progress("methods", 0, len(attempts))
    quick = [one for one in attempts if one.method.quick]
    for one in quick:
        one.quickly(deadline - time.monotonic())
        tried()
    slow = [one for one in attempts if not one.method.quick]
    try_together(slow, deadline, [one.result() for one in quick], tried)
    return [one.result() for one in attempts]


def try_together(
    towers: Sequence[Attempt],
    deadline: float,
    rivals: Sequence[Candidate] = (),
    tried: Callable[[], None] = lambda: None,
) -> None:
    """Try methods that train inside the towers until a time (of `time.monotonic`).

    All that need about as long are shortened alike where they do not fit; what is left goes to further parts
    of those that have not lost to any rival. Methods that need far longer come last, if they can take a good
    share of their steps. `tried` is called after each.
    """
    for place, one in enumerate(towers):
        one.prepare((deadline - time.monotonic()) / (len(towers) - place))
        if one.skipped is not None:
            tried()
    ready = [one for one in towers if one.skipped is None]
    quickest = min((one.full.needs for one in ready), default=0.0)
    group = [one for one in ready if one.full.needs <= PUT_OFF * quickest]
    for place, one in enumerate(group):
        rest = sum(other.full.needs for other in group[place:])
        one.first((deadline - time.monotonic()) * one.full.needs / max(1e-9, rest))
        tried()
    for one in [one for _ in range(1, max((one.folds for one in group), default=1)) for one in group]:
        found = [other.result() for other in group if other is not one]
        if one.skipped is None and not _lost(one.result(), [*rivals, *found]):
            one.more(deadline)
    for one in ready:
        if one not in group:
            one.first(deadline - time.monotonic(), LEAST_SHARE)
            tried()


def _lost(one: Candidate, rivals: Sequence[Candidate]) -> bool:
    """Whether some rival is clearly better on the images of both."""
    own = one.trained
    assert own is not None
    answers = [other.trained for other in rivals if other.trained is not None]
    return any(better(rival.on(own.rows), own.on(rival.rows), _LOST) for rival in answers)


def measure_pace(method: Method, trials: Trials, folds: int, turns: int) -> Pace:
    """Time a few training steps of a copy of the method."""
    return Pace(_time_of_step(method, trials), _steps(trials), folds, turns)


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
        stop=lambda: len(times) > (1 if times and times[-1] - times[0] > _PROBE_S else _PROBE),
    )
    try:
        probe.teach(fresh(method, method.classes, None, trials.recipe.seed), torch.arange(len(trials.images)))
    except Paused:
        if not times:
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
