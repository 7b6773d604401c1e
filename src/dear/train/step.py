"""One training step, launched kernel by kernel or replayed from a recording; chosen once per run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from dear.errors import UsageError
from dear.methods.base import Loss, Method
from dear.train.feed import Feed
from dear.train.frozen import FeatureTable, FrozenAhead, KeptViews, StepInputs
from dear.train.recording import Inputs, Recording, can_record

_WORTH_RECORDING = 50  # steps


@dataclass(frozen=True)
class StepParts:
    """What a step works with."""

    method: Method  #: bound to the backbone it trains with
    feed: Feed
    learned: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    def gradients(self, inputs: StepInputs) -> Loss:
        """The loss of a step's inputs, with gradients left on the learned tensors."""
        loss = self.method.loss_from_frozen(*inputs)
        self.method.backward(loss, self.scaler.scale)
        return loss

    def update(self) -> None:
        """Change the learned tensors by their gradients."""
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Step(Protocol):
    """Takes training steps by number (from 0)."""

    def __call__(self, number: int) -> Loss:
        """Gradients of the step's batch and the update they make; the loss before the update."""
        ...


class EagerStep:
    """Both stages and the update, launched kernel by kernel."""

    def __init__(self, parts: StepParts, kept: KeptViews | None = None) -> None:
        self.parts, self.kept = parts, kept

    def __call__(self, number: int) -> Loss:
        """Take step `number`."""
        parts = self.parts
        parts.optimizer.zero_grad(set_to_none=True)
        if self.kept is None:
            loss = parts.method.loss(*parts.feed.at(number))
            parts.method.backward(loss, parts.scaler.scale)
        else:
            loss = parts.gradients(self.kept.at(number))
        parts.update()
        return loss


class TableStep:
    """A step on frozen features that are known: the learned stage and the update alone."""

    def __init__(self, parts: StepParts, table: FeatureTable) -> None:
        self.parts, self.table = parts, table

    def __call__(self, number: int) -> Loss:
        """Take step `number`."""
        self.parts.optimizer.zero_grad(set_to_none=True)
        loss = self.parts.gradients(self.table.at(number))
        self.parts.update()
        return loss


class RecordedStep:
    """On a GPU: the frozen stage ahead of time for several steps, the rest recorded once and replayed.

    Batches that are not whole are launched kernel by kernel.
    """

    def __init__(self, parts: StepParts, inputs: FrozenAhead | KeptViews) -> None:
        self.parts, self.inputs = parts, inputs
        self.recording: Recording | None = None
        self._updates = can_record(parts.optimizer)  # else the update is not part of the recording

    def __call__(self, number: int) -> Loss:
        """Take step `number`."""
        parts, inputs = self.parts, self.inputs.at(number)
        if len(inputs.labels) != parts.feed.recipe.batch:
            parts.optimizer.zero_grad(set_to_none=True)
            loss = parts.gradients(inputs)
            parts.update()
            return loss
        flat = (*inputs.frozen, inputs.labels, inputs.domains)
        if self.recording is None:
            optimizer = parts.optimizer if self._updates else None
            self.recording = Recording(self._recorded, flat, parts.learned, optimizer)
        loss = self.recording(flat)
        if not self._updates:
            parts.update()
        return loss

    def _recorded(self, inputs: Inputs) -> Loss:
        *frozen, labels, domains = inputs
        assert labels is not None
        return self.parts.gradients(StepInputs(tuple(_present(frozen)), labels, domains))


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def make_step(
    parts: StepParts, steps: int, left: int, table: FeatureTable | None = None
) -> EagerStep | RecordedStep | TableStep:
    """The kind of step that a run takes: recorded where that is allowed and saves time.

    Args:
        parts: what a step works with.
        steps: how many steps the run has.
        left: how many of them are still to be taken.
        table: the frozen features of all images, where they are known.
    """
    if table is not None:
        return TableStep(parts, table)
    splits = type(parts.method).loss is Method.loss  # one that replaces both stages cannot be split
    if parts.feed.recipe.views and not splits:
        raise UsageError(
            f"the method {parts.method.name!r} has no frozen stage to keep: set the recipe's views to 0"
        )
    kept = KeptViews(parts.method, parts.feed) if parts.feed.recipe.views else None
    recorded = (
        parts.feed.recipe.replay
        and parts.method.cuda_graph_safe
        and splits
        and parts.feed.device.type == "cuda"
        and not parts.scaler.is_enabled()
        and left >= _WORTH_RECORDING
    )
    if recorded:
        return RecordedStep(parts, kept or FrozenAhead(parts.method, parts.feed, steps))
    return EagerStep(parts, kept)
