"""What of a step does not depend on what is learned, computed for several steps at once.

A small batch leaves a GPU half idle. The frozen part of a step (crops, frozen layers, frozen features) waits
for no learned tensor, so that of the next steps is run as one large batch; the same numbers but for rounding.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from dear.methods.base import Loss
from dear.train.feed import Feed

AT_ONCE = 256  #: images; a GPU is full with them, and their activations take 160 MB on ViT-B/16


@runtime_checkable
class Foresees(Protocol):
    """A method whose loss can be computed in two parts, the first from frozen weights alone."""

    def ahead(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """What the loss of pixels [B, 3, S, S] needs of the frozen model: tensors [B, ...]."""

    def loss_from(self, ahead: tuple[Tensor, ...], labels: Tensor) -> Loss:
        """The loss from there."""


class Given(NamedTuple):
    """What a step is computed from."""

    ahead: tuple[Tensor, ...]
    labels: Tensor


def steps_ahead(size: int, batch: int) -> int:
    """How many steps' images run at once; larger images take more memory, so fewer of them.

    >>> steps_ahead(224, 16), steps_ahead(448, 16), steps_ahead(224, 1000)
    (16, 4, 1)
    """
    return max(1, min(AT_ONCE, AT_ONCE * 224**2 // size**2) // batch)


class Lookahead:
    """The frozen part of every step of a run. Groups of steps do not depend on where a run resumed.

    Args:
        method: tells what it needs ahead.
        feed: the batches.
        steps: how many steps the run has.
    """

    def __init__(self, method: Foresees, feed: Feed, steps: int) -> None:
        self.method, self.feed, self.steps = method, feed, steps
        self.span = steps_ahead(feed.size, feed.recipe.batch)
        self._group, self._parts = -1, list[Given]()

    def at(self, step: int) -> Given:
        """The given of a training step (from 0)."""
        group, place = divmod(step, self.span)
        if group != self._group:
            self._parts = []  # its memory is free for the next
            first = group * self.span
            batch, counts = self.feed.span(first, min(first + self.span, self.steps))
            with torch.no_grad():
                ahead = self.method.ahead(batch.pixels)
            pieces = zip(*(tensor.split(counts) for tensor in (*ahead, batch.labels)), strict=True)
            self._parts = [Given(tuple(piece[:-1]), piece[-1]) for piece in pieces]
            self._group = group
        return self._parts[place]
