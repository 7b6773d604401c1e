"""How far a model's answers depend on a concept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

MIN_RELIANCE = 0.05  #: share of the answers that change without the concept
#: share of the margin that depends on the concept; from one half on, the mean margin is negative where the
#: concept speaks for another class, which held-out images with the same shortcut do not show
MIN_MARGIN_RELIANCE = 0.5
MIN_SHIFT = 0.05  #: share of the margin from which on scores count as shifted


@dataclass(frozen=True)
class Reliance:
    """How a model's answers change when a concept is removed, without training again."""

    changed: float  #: share of answers that change
    margin: float  #: mean of the true class's score minus the best other score, before
    margin_without: float  #: the same with the concept removed
    way: str = "words"  #: how it was removed

    @property
    def lost(self) -> float:
        """Share of the margin that depends on the concept; 0 where the margin grows."""
        return max(0.0, (self.margin - self.margin_without) / max(abs(self.margin), 1e-9))

    @property
    def sentence(self) -> str:
        """The change in a few words."""
        changed = f"without it {self.changed:.1%} of the answers change"
        return f"{changed} and the margin falls by {self.lost:.1%}" if self.lost >= 0.005 else changed

    @property
    def strength(self) -> float:
        """The larger of changed answers and lost margin, each relative to what is required; 1 is enough."""
        return max(self.changed / MIN_RELIANCE, self.lost / MIN_MARGIN_RELIANCE)

    @property
    def relies(self) -> bool:
        """Whether answers depend on the concept: some change, or half of the margin is lost without it."""
        return self.strength >= 1

    @property
    def shifts(self) -> bool:
        """Whether scores depend on the concept, but hardly any answer does."""
        return not self.relies and self.lost >= MIN_SHIFT


def reliance(before: Tensor, after: Tensor, labels: Tensor, way: str = "words") -> Reliance:
    """Reliance from scores [n, C] before and after the concept's removal."""
    return Reliance(
        float((before.argmax(dim=1) != after.argmax(dim=1)).double().mean()),
        margin(before, labels),
        margin(after, labels),
        way,
    )


def margin(scores: Tensor, labels: Tensor) -> float:
    """Mean of the true class's score minus the best other score.

    >>> import torch
    >>> margin(torch.tensor([[3.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    0.5
    """
    true = scores.gather(1, labels[:, None])
    other = scores.scatter(1, labels[:, None], -math.inf).amax(dim=1, keepdim=True)
    return float((true - other).double().mean())
