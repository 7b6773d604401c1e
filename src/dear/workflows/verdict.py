"""Which method to take, in words: accuracies with intervals, and no winner inside the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dear.train.confidence import share_interval

STRENGTH = (
    "mmrl",
    "dear",
    "proker",
    "lp-plus-plus",
    "linear-probe",
    "clip-lora",
    "tip-adapter-f",
    "prolip",
    "zeroshot",
)
"""Methods by their mean accuracy on the test images of four datasets, textures and scenes of the attribute
world, Caltech101 and DTD, for trained as for new classes (benchmarks/results/fair_table.csv). Where a
person's own images do not tell methods apart, the first of them is the better guess."""


@dataclass(frozen=True)
class Answers:
    """Right or wrong, image by image.

    Attributes:
        right: whether each image was answered rightly, [n].
        rows: places of the images in the set, ascending, [n].
    """

    right: Tensor
    rows: Tensor

    @property
    def accuracy(self) -> float:
        """Share of images answered rightly."""
        return float(self.right.double().mean())

    def figures(self) -> dict[str, float | int]:
        """Plain values: accuracy with an interval that is 90 % sure."""
        hits, images = int(self.right.sum()), len(self.right)
        low, high = share_interval(hits, images)
        return {"accuracy": hits / images, "low": low, "high": high, "images": images}

    def on(self, rows: Tensor) -> Tensor:
        """The answers for the images at `rows` that are there, [m]."""
        return self.right[torch.isin(self.rows, rows)]

    def shared(self, other: Answers) -> Answers:
        """The answers for images that both know."""
        return Answers(self.on(other.rows), self.rows[torch.isin(self.rows, other.rows)])

    def __str__(self) -> str:
        """With half the width of the interval: "92 ± 2 %"."""
        found = self.figures()
        return f"{100 * self.accuracy:.0f} ± {50 * (found['high'] - found['low']):.0f} %"


@dataclass(frozen=True)
class Candidate:
    """How a method did in cross-validation.

    Attributes:
        method: its name.
        title: its name in tables.
        preset: the named setting that was used, if any.
        trained: for held-out images, among all classes.
        new: for images of left-out classes, among left-out classes; None: the method cannot name new classes,
            or there are too few classes to leave some out.
        seconds: of one training on all images, estimated from the folds.
        mode: how it predicted trained classes.
        new_mode: how it predicted new ones.
        effort: what was done: parts held out, steps of each training.
        shortened: whether trainings had fewer steps than usual, so that the full method may do better.
        skipped: why it was not tried; None: it was.
    """

    method: str
    title: str
    preset: str | None = None
    trained: Answers | None = None
    new: Answers | None = None
    seconds: float = 0.0
    mode: str = "default"
    new_mode: str = "default"
    effort: str = ""
    shortened: bool = False
    skipped: str | None = None

    def row(self) -> dict[str, Any]:
        """Plain values for a table or JSON: shares of 1, with intervals that are 90 % sure."""
        return {
            "method": self.method,
            "title": self.title,
            "preset": self.preset,
            "trained": None if self.trained is None else self.trained.figures(),
            "new": None if self.new is None else self.new.figures(),
            "seconds": round(self.seconds, 1),
            "mode": self.mode,
            "new_mode": self.new_mode,
            "effort": self.effort,
            "shortened": self.shortened,
            "skipped": self.skipped,
        }


def better(first: Tensor, second: Tensor, doubt: float = 0.1) -> bool:
    """Whether one method beats another on the same images beyond chance (exact McNemar test, two-sided).

    >>> import torch
    >>> yes, no = torch.tensor([True] * 30), torch.tensor([True] * 24 + [False] * 6)
    >>> better(yes, no), better(yes[:3], no[-3:])
    (True, False)
    """
    wins, losses = int((first & ~second).sum()), int((~first & second).sum())
    at_most = sum(math.comb(wins + losses, few) for few in range(losses + 1))
    return wins > losses and 2 * at_most < doubt * 2 ** (wins + losses)


def best_of(candidates: Sequence[Candidate], column: str) -> list[Candidate]:
    """The method with the highest accuracy and all that chance cannot tell from it, by `STRENGTH`.

    One that answered for some of the images is compared with others on those.
    """
    found: dict[int, Answers] = {id(one): getattr(one, column) for one in candidates}
    most = max(len(answers.rows) for answers in found.values())
    whole = [one for one in candidates if len(found[id(one)].rows) == most]
    anchor = max(whole, key=lambda one: (found[id(one)].accuracy, -one.seconds))
    level = {
        id(one): found[id(anchor)].accuracy - _lead(found[id(anchor)], found[id(one)]) for one in candidates
    }
    top = max(candidates, key=lambda one: (level[id(one)], -one.seconds))

    def as_good(one: Candidate) -> bool:
        first, second = found[id(top)], found[id(one)]
        return not better(first.on(second.rows), second.on(first.rows))

    return sorted((one for one in candidates if as_good(one)), key=_strength)


def _strength(one: Candidate) -> tuple[int, float]:
    place = STRENGTH.index(one.method) if one.method in STRENGTH else len(STRENGTH)
    return place, one.seconds


def _lead(first: Answers, second: Answers) -> float:
    """How much more accurate the first is than the second, on the images of both."""
    return float(first.on(second.rows).double().mean() - second.on(first.rows).double().mean())


@dataclass(frozen=True)
class Choice:
    """What `dear choose` found.

    Attributes:
        candidates: every method that was considered.
        pick: the one to take for the classes at hand.
        pick_for_new: the one to take if classes will be added later; None: it could not be measured.
        sentence: the recommendation.
        notes: what the reader should know about the data.
        seconds: that choosing took.
    """

    candidates: tuple[Candidate, ...]
    pick: Candidate
    pick_for_new: Candidate | None
    sentence: str
    notes: tuple[str, ...]
    seconds: float

    def report(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "pick": self.pick.method,
            "preset": self.pick.preset,
            "pick_for_new_classes": None if self.pick_for_new is None else self.pick_for_new.method,
            "recommendation": self.sentence,
            "notes": list(self.notes),
            "methods": [one.row() for one in self.candidates],
            "seconds": round(self.seconds, 1),
        }


def recommend(candidates: Sequence[Candidate], seconds: float, notes: Sequence[str] = ()) -> Choice:
    """Of the methods that may be as good as the best, the one that did best on other datasets; in words."""
    tried = [one for one in candidates if one.trained is not None]
    alike = best_of(tried, "trained")
    pick = alike[0]
    sentence = f"Take {_name(pick)}: {_compared(pick, [one for one in tried if one is not pick])}"
    sentence += f", and it trains in {_duration(pick.seconds)}."
    if len(alike) > 1:
        sentence += _in_doubt(pick, alike[1:])
    open_ones = [one for one in tried if one.new is not None]
    later = None
    if open_ones:
        later = best_of(open_ones, "new")[0]
        if later is pick:
            sentence += f" It is also the one to take if you will add classes later ({pick.new})."
        else:
            own = "cannot name new classes" if pick.new is None else f"reaches {pick.new}"
            sentence += (
                f" Take {_name(later)} if you will add classes later: {later.new} on classes it "
                f"was not trained on ({_name(pick)} {own})."
            )
    return Choice(tuple(candidates), pick, later, sentence, tuple(notes), seconds)


def _compared(pick: Candidate, others: Sequence[Candidate]) -> str:
    """The accuracy of a method and that of the best other one, both on the images of both."""
    own = pick.trained
    assert own is not None
    answers = {_name(one): one.trained for one in others if one.trained is not None}
    if not answers:
        return str(own)
    name = min(answers, key=lambda name: _lead(own, answers[name]))
    mine, other = own.shared(answers[name]), answers[name].shared(own)
    whole = len(mine.rows) == max(len(one.rows) for one in (own, *answers.values()))
    return f"{mine} against {other} of {name}" + ("" if whole else f" on the same {len(mine.rows)} images")


def _in_doubt(pick: Candidate, others: Sequence[Candidate]) -> str:
    """That chance explains the difference to some methods, and which of them trains much faster."""
    names = [_name(one) for one in others]
    listed = " and ".join(names) if len(names) < 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
    said = f" So few images do not tell it from {listed}; on other datasets it was the best of these."
    quick = next((one for one in others if one.seconds < pick.seconds / 5), None)
    if pick.seconds > 10 and quick is not None and quick.trained is not None and pick.trained is not None:
        reached = quick.trained.shared(pick.trained)
        said += f" {_name(quick)} trains in {_duration(quick.seconds)} and reaches {reached}."
    return said


def _name(one: Candidate) -> str:
    return one.title if one.preset is None else f"{one.title} ({one.preset})"


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:.0f} min"
