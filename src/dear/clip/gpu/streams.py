"""Two independent pieces of work side by side on a GPU, while a step is recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


@cache
def _second(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def side_by_side(
    aside: Callable[[], Tensor], work: Callable[[], Result], device: torch.device
) -> tuple[Tensor, Result]:
    """The results of both functions; while a graph is recorded, the first may run beside the second.

    On a CPU one follows the other, and so they do while no graph is recorded: then launching is what takes
    the time, and one stream is as fast as two. The backward pass follows: PyTorch runs it on the streams of
    the forward pass.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return aside(), work()
    stream = _second(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first = aside()
    second = work()
    torch.cuda.current_stream().wait_stream(stream)
    first.record_stream(torch.cuda.current_stream())
    return first, second
