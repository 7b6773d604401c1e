"""A training step recorded once and replayed: on a GPU, launching a small step takes longer than its work."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from dear.clip.gpu import Recording
from dear.methods.frozen import Loss

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
        optimizer: updates them within the recording; None: the caller updates. It must have taken a step,
            for state that it allocates within the recording would be allocated in every replay.
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
    """Mark tensors as changed in place, which a replay does not do.

    What is cached by a tensor's version (`Method.cached`) is then computed again.
    """
    for tensor in learned:
        torch.autograd.graph.increment_version(tensor)


def can_record(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's update can be part of a recording."""
    return all(group.get("capturable", False) for group in optimizer.param_groups)
