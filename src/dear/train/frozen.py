"""The frozen stage of several training steps, computed at once.

A small batch leaves a GPU half idle. The frozen stage of a step (crops, frozen layers, frozen features) waits
for no learned tensor, so that of the next steps is run as one large batch; equal up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dear.methods.base import Frozen, Method
from dear.train.feed import Feed

IMAGES_AT_ONCE = 256  #: they fill a GPU, and their activations take 160 MB on ViT-B/16


class StepInputs(NamedTuple):
    """What the learned stage of a step is computed from."""

    frozen: Frozen  #: tensors [B, ...]
    labels: Tensor  #: [B]
    domains: Tensor | None = None  #: [B]


def steps_at_once(size: int, batch: int) -> int:
    """How many steps' images run at once; larger images take more memory, so fewer of them.

    >>> steps_at_once(224, 16), steps_at_once(448, 16), steps_at_once(224, 1000)
    (16, 4, 1)
    """
    return max(1, min(IMAGES_AT_ONCE, IMAGES_AT_ONCE * 224**2 // size**2) // batch)


class FrozenAhead:
    """The frozen stage of every step of a run. Groups of steps do not depend on where a run resumed.

    Args:
        method: whose frozen stage is computed.
        feed: the batches.
        steps: how many steps the run has.
    """

    def __init__(self, method: Method, feed: Feed, steps: int) -> None:
        self.method, self.feed, self.steps = method, feed, steps
        self.span = steps_at_once(feed.size, feed.recipe.batch)
        self._group, self._parts = -1, list[StepInputs]()

    def at(self, step: int) -> StepInputs:
        """The inputs of a training step (from 0)."""
        group, place = divmod(step, self.span)
        if group != self._group:
            self._parts = []  # its memory is free for the next
            self._parts = self._compute(group * self.span)
            self._group = group
        return self._parts[place]

    def _compute(self, first: int) -> list[StepInputs]:
        """The inputs of the steps from `first` on, as many as run at once."""
        batch, counts = self.feed.span(first, min(first + self.span, self.steps))
        with torch.no_grad():
            frozen = self.method.frozen_stage(batch.pixels)
        stages = zip(*(tensor.split(counts) for tensor in frozen), strict=True)
        labels = batch.labels.split(counts)
        domains = [None] * len(counts) if batch.domains is None else batch.domains.split(counts)
        return [StepInputs(*parts) for parts in zip(stages, labels, domains, strict=True)]
