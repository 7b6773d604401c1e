"""A training step recorded once and replayed: on a GPU, launching a small step takes longer than its work."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from dear.clip.gpu import Recording
from dear.methods.base import Loss

_WARM_UP = 3  # steps before recording

Inputs = Sequence[Tensor | None]  #: tensors of one step


class StepRecording:
    """Loss, gradients and update of a method on inputs of one shape, recorded.

    Learned tensors, buffers, the optimizer's state and its learning rate are read and written where they are,
    and gradients are left in fixed places: what `step` refers to (a bound method with its prompts and
    backbone) is never exchanged.

    Args:
        step: from inputs to the loss, with gradients put on the learned tensors.
        inputs: those of one step.
        learned: the learned tensors.
        optimizer: updates them within the recording, if it can work there; else the caller updates.
    """

    def __init__(
        self,
        step: Callable[[Inputs], Loss],
        inputs: Inputs,
        learned: Sequence[Tensor],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.updates = optimizer is not None

        def gradients(*inputs: Tensor | None) -> Loss:
            for p in learned:
                p.grad = None
            loss = step(inputs)
            if optimizer is not None and torch.cuda.is_current_stream_capturing():
                optimizer.step()
            return Loss(loss.total.detach(), loss.parts)  # nothing of the autograd graph is kept

        if optimizer is not None:
            _make_state(optimizer, learned)
        # A recording of an earlier training that is freed during this one would spoil it.
        gc.collect()
        self.recording = Recording(gradients, inputs, warm_up=_WARM_UP, error_mode="global")
        self.grads = [(p, p.grad) for p in learned]

    def __call__(self, inputs: Inputs) -> Loss:
        """The step on other inputs of the same shapes."""
        for p, grad in self.grads:
            p.grad = grad
        loss = self.recording(inputs)
        if self.updates:
            mark_changed(p for p, _ in self.grads)
        return loss


def mark_changed(learned: Iterable[Tensor]) -> None:
    """Tell PyTorch that tensors were changed in place, which a replay does without its knowledge.

    What is cached by a tensor's version (`Method.cached`) is then computed again.
    """
    for tensor in learned:
        torch.autograd.graph.increment_version(tensor)


def can_record(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's update can be part of a recording."""
    return all(group.get("capturable", False) for group in optimizer.param_groups)


def _make_state(optimizer: torch.optim.Optimizer, learned: Sequence[Tensor]) -> None:
    """Have the optimizer make its state now: what it makes within a recording is made in every replay."""
    missing = [p for p in learned if not optimizer.state[p]]
    if not missing:
        return
    rates = [group["lr"].clone() for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"].zero_()
    grads = [p.grad for p in learned]
    for p in learned:  # only those without state take part, with a gradient that moves nothing
        p.grad = torch.zeros_like(p) if any(p is other for other in missing) else None
    optimizer.step()
    for p in missing:
        optimizer.state[p]["step"].zero_()
    for p, grad in zip(learned, grads, strict=True):
        p.grad = grad
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"].copy_(rate)
