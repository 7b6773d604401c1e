"""Two independent computations that run concurrently on a GPU when a step is recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def run_concurrently(
    first: Callable[[], Tensor], second: Callable[[], Result], device: torch.device
) -> tuple[Tensor, Result]:
    """The results of both functions; while a graph is recorded, the first runs on a second stream.

    On a CPU, and while no graph is recorded, they run one after the other: launching kernels dominates the
    time, and one stream is as fast as two. PyTorch runs the backward pass on the streams of the forward pass.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return first(), second()
    stream = _second_stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first_result = first()
    second_result = second()
    torch.cuda.current_stream().wait_stream(stream)
    first_result.record_stream(torch.cuda.current_stream())
    return first_result, second_result
