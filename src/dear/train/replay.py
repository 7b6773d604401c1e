"""A training step recorded once and replayed: on a GPU, launching a small step takes longer than its work."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dear.methods.base import Batch, Loss, Method

_WARM_UP = 3  # steps before recording, so that libraries have chosen their kernels and taken their memory


class Replay:
    """Loss and gradients of a method on batches of one shape, as a CUDA graph.

    The recorded step reads its batch from fixed places and leaves the gradients in fixed places; learned
    tensors and buffers are read where they are, so an optimiser that works in place goes on as usual.
    """

    def __init__(self, method: Method, batch: Batch, scale: Callable[[Tensor], Tensor]) -> None:
        domains = None if batch.domains is None else batch.domains.clone()
        self.batch = Batch(batch.pixels.clone(), batch.labels.clone(), domains)
        learned = [p for p in method.parameters() if p.requires_grad]

        def step() -> Loss:
            for p in learned:
                p.grad = None
            loss = method.loss(*self.batch)
            method.backward(loss, scale)
            return Loss(loss.total.detach(), loss.parts)  # nothing of the autograd graph is kept

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = step()
        self.grads = [(p, p.grad) for p in learned]

    def __call__(self, batch: Batch) -> Loss:
        """The step on another batch of the same shape."""
        for place, part in zip(self.batch, batch, strict=True):
            if place is not None and part is not None:
                place.copy_(part)
        for p, grad in self.grads:
            p.grad = grad
        self.graph.replay()
        return self.loss
