"""The result of a comparison of methods: a leaderboard and a recommendation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from scipy.stats import binomtest
from torch import Tensor

from dear.runs.evaluation import share_interval
from dear.runs.model import Model

if TYPE_CHECKING:
    import pandas as pd

DOUBT = 0.1  #: probability of chance above which two methods count as equally good


@dataclass(frozen=True)
class Candidate:
    """Results of a method in cross-validation."""

    method: str
    title: str
    preset: str | None = None
    trained: Tensor | None = None  #: whether the answer for each held-out image is right, bool [n]
    new: Tensor | None = None  #: the same for images of held-out classes; None: it cannot name new classes
    seconds: float = 0.0  #: of its cross-validation, without image features that other methods share
    skipped: str | None = None  #: why it was not compared
    needed: float = 0.0  #: seconds that a skipped method would take, where they could be estimated

    def row(self) -> dict[str, Any]:
        """Plain values for a table or JSON: shares of 1, with 90% confidence intervals."""
        return {
            "method": self.method,
            "title": self.title,
            "preset": self.preset,
            "trained": _figures(self.trained),
            "new": _figures(self.new),
            "seconds": round(self.seconds, 1),
            "skipped": self.skipped,
        }


@dataclass(frozen=True)
class Choice:
    """Methods compared by cross-validation, and the recommended one; a notebook shows the leaderboard."""

    candidates: tuple[Candidate, ...]
    pick: Candidate  #: for the trained classes: the most accurate, or a faster one that is as good
    pick_for_new: Candidate | None  #: the same for classes added later; None: not measured
    notes: tuple[str, ...]
    seconds: float
    run: Model | None = None  #: the recommended method trained on all images, where that was requested

    @property
    def minutes_needed(self) -> int | None:
        """Minutes that would be enough for the skipped methods as well; None: none was skipped."""
        needed = sum(one.needed for one in self.candidates)
        return None if not needed else math.ceil(1.1 * (self.seconds + needed) / 60)

    @property
    def sentence(self) -> str:
        """The recommendation."""
        alike = [one.title for one in self.candidates if one is not self.pick and _as_good(one, self.pick)]
        text = f"Use {self.pick.title}."
        if alike:
            text += f" On this number of images it does not differ significantly from {join_names(alike)}."
        if self.pick_for_new is not None and self.pick_for_new is not self.pick:
            text += f" Use {self.pick_for_new.title} if you will add classes later."
        return text

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "pick": self.pick.method,
            "preset": self.pick.preset,
            "pick_for_new_classes": None if self.pick_for_new is None else self.pick_for_new.method,
            "recommendation": self.sentence,
            "notes": list(self.notes),
            "methods": [one.row() for one in self.candidates],
            "seconds": round(self.seconds, 1),
            "minutes_needed": self.minutes_needed,
        }

    def rows(self) -> list[dict[str, Any]]:
        """The leaderboard, most accurate first: accuracies with 90% confidence intervals, fractions of 1."""
        rows = []
        for one in self.candidates:
            row: dict[str, Any] = {"method": one.method, "title": one.title, "preset": one.preset}
            for column, figures in (("trained", _figures(one.trained)), ("new", _figures(one.new))):
                for name, key in (("", "accuracy"), ("_low", "low"), ("_high", "high")):
                    row[f"{column}{name}"] = None if figures is None else figures[key]
            rows.append({**row, "seconds": round(one.seconds, 1), "skipped": one.skipped})
        return sorted(rows, key=lambda row: -1.0 if row["trained"] is None else row["trained"], reverse=True)

    def to_frame(self) -> pd.DataFrame:
        """The leaderboard as a pandas table."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def __repr__(self) -> str:
        return f"<Choice: {self.sentence}>"

    def _repr_html_(self) -> str:
        cells = [
            (
                row["title"],
                row["skipped"]
                or f"{row['trained']:.1%} ({row['trained_low']:.1%} to {row['trained_high']:.1%})",
                "" if row["new"] is None else f"{row['new']:.1%}",
                f"{row['seconds']:.1f} s",
            )
            for row in self.rows()
        ]
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells
        )
        head = "<tr><th>method</th><th>trained classes</th><th>new classes</th><th>time</th></tr>"
        return f"<p>{escape(self.sentence)}</p><table>{head}{body}</table>"


def _figures(right: Tensor | None) -> dict[str, float | int] | None:
    """Accuracy with its 90% confidence interval."""
    if right is None:
        return None
    hits, images = int(right.sum()), len(right)
    low, high = share_interval(hits, images)
    return {"accuracy": hits / images, "low": low, "high": high, "images": images}


def _as_good(one: Candidate, best: Candidate) -> bool:
    """Whether chance explains the difference on the same images (McNemar's exact test)."""
    if one.trained is None or best.trained is None:
        return False
    wins, losses = int((best.trained & ~one.trained).sum()), int((~best.trained & one.trained).sum())
    return wins + losses == 0 or binomtest(wins, wins + losses).pvalue >= DOUBT


def join_names(names: Sequence[str]) -> str:
    """Names as text.

    >>> join_names(["a"]), join_names(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
