"""Which method to take, in words: accuracies with intervals, and no winner inside the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dear.train.confidence import share_interval


@dataclass(frozen=True)
class Candidate:
    """How a method did in cross-validation.

    Attributes:
        method: its name.
        title: its name in tables.
        preset: the named setting that was used, if any.
        trained: whether each held-out image was answered rightly among all classes, [n].
        new: the same for images of left-out classes, answered among left-out classes, [m]; None: the method
            cannot name new classes, or there are too few classes to leave some out.
        seconds: of one training on all images, estimated from the folds.
        mode: how it predicted trained classes.
        new_mode: how it predicted new ones.
        skipped: why it was not tried; None: it was.
    """

    method: str
    title: str
    preset: str | None = None
    trained: Tensor | None = None
    new: Tensor | None = None
    seconds: float = 0.0
    mode: str = "default"
    new_mode: str = "default"
    skipped: str | None = None

    def row(self) -> dict[str, Any]:
        """Plain values for a table or JSON: shares of 1, with intervals that are 90 % sure."""
        return {
            "method": self.method,
            "title": self.title,
            "preset": self.preset,
            "trained": _figures(self.trained),
            "new": _figures(self.new),
            "seconds": round(self.seconds, 1),
            "mode": self.mode,
            "new_mode": self.new_mode,
            "skipped": self.skipped,
        }


def _figures(right: Tensor | None) -> dict[str, float | int] | None:
    if right is None or len(right) == 0:
        return None
    hits = int(right.sum())
    low, high = share_interval(hits, len(right))
    return {"accuracy": hits / len(right), "low": low, "high": high, "images": len(right)}


def better(first: Tensor, second: Tensor, doubt: float = 0.1) -> bool:
    """Whether one method beats another on the same images beyond chance (exact McNemar test, two-sided).

    >>> import torch
    >>> yes, no = torch.tensor([True] * 30), torch.tensor([True] * 24 + [False] * 6)
    >>> better(yes, no), better(yes[:3], no[-3:])
    (True, False)
    """
    from scipy.stats import binomtest

    wins, losses = int((first & ~second).sum()), int((~first & second).sum())
    return wins > losses and bool(binomtest(wins, wins + losses).pvalue < doubt)


def best_of(candidates: Sequence[Candidate], column: str) -> list[Candidate]:
    """The method with the highest accuracy and all that it does not beat beyond chance, fastest first."""
    answers = {id(one): getattr(one, column) for one in candidates}
    top = max(candidates, key=lambda one: (float(answers[id(one)].float().mean()), -one.seconds))
    tied = [one for one in candidates if not better(answers[id(top)], answers[id(one)])]
    return sorted(tied, key=lambda one: one.seconds)


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
    """Of the methods that chance cannot tell from the best, the one that trains fastest; in words."""
    tried = [one for one in candidates if one.trained is not None and len(one.trained)]
    tied = best_of(tried, "trained")
    pick = tied[0]
    runner = max((one for one in tried if one is not pick), key=_accuracy, default=None)
    sentence = f"Take {_name(pick)}: {_percent(pick.trained)}"
    if runner is not None:
        sentence += f" against {_percent(runner.trained)} of {_name(runner)}"
    sentence += f", and it trains in {_duration(pick.seconds)}."
    if len(tied) > 1:
        same = ", ".join(_name(one) for one in tied[1:4])
        more = f" and {len(tied) - 4} more" if len(tied) > 4 else ""
        sentence += f" On so few images {same}{more} cannot be told from the best; the fastest is named."
    open_ones = [one for one in tried if one.new is not None and len(one.new)]
    later = None
    if open_ones:
        level = best_of(open_ones, "new")
        later = pick if pick in level else max(level, key=_accuracy)
        if later is pick:
            sentence += f" It is also the one to take if you will add classes later ({_percent(pick.new)})."
        else:
            own = "cannot name new classes" if pick.new is None else f"reaches {_percent(pick.new)}"
            sentence += (
                f" Take {_name(later)} if you will add classes later: {_percent(later.new)} on classes it "
                f"was not trained on ({_name(pick)} {own})."
            )
    return Choice(tuple(candidates), pick, later, sentence, tuple(notes), seconds)


def _accuracy(one: Candidate) -> float:
    return 0.0 if one.trained is None else float(one.trained.float().mean())


def _name(one: Candidate) -> str:
    return one.title if one.preset is None else f"{one.title} ({one.preset})"


def _percent(right: Tensor | None) -> str:
    """An accuracy with half the width of its interval: "92 ± 2"."""
    assert right is not None
    low, high = share_interval(int(right.sum()), len(right))
    return f"{100 * float(right.float().mean()):.0f} ± {50 * (high - low):.0f} %"


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:.0f} min"
