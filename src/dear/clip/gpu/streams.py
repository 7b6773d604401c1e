"""Two independent pieces of work side by side on a GPU, while a step is recorded as a CUDA graph."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def _second(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Aside:
    """Work on the side: what is launched within `with side.work():` may run beside what follows it.

    While no graph is recorded it changes nothing: launching is then what takes the time, and one stream is as
    fast as two. The backward pass follows: PyTorch runs it on the streams of the forward pass.
    """

    def __init__(self, device: torch.device) -> None:
        recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._stream = _second(device) if recording else None

    def work(self) -> AbstractContextManager[Any]:
        """Where the side work is launched."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def join(self, result: Tensor) -> Tensor:
        """The side work's result, ready for what is launched next."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            result.record_stream(torch.cuda.current_stream())
        return result
