"""Inference recorded once per batch size and replayed: on a GPU, launching a small batch outlasts its work.

A recorded function takes and returns tensors [B, ...] whose rows do not depend on each other. Batches are
padded to the next of a few sizes, so that a handful of recordings serves every batch.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Tensors = TypeVar("Tensors", bound=tuple[Tensor | None, ...])  #: a tuple or NamedTuple
Inputs = Sequence[Tensor | None]
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  #: batch sizes that are recorded
_LIMIT = 128  # recordings kept; the least recently used one makes room


class Runner(Protocol):
    """Runs a function of tensors [B, ...]; equal keys mean the same function. None stays None."""

    def __call__(self, key: Hashable, function: Callable[..., Tensors], *inputs: Tensor | None) -> Tensors:
        """`function(*inputs)`."""


def run_eagerly(key: Hashable, function: Callable[..., Tensors], *inputs: Tensor | None) -> Tensors:
    """`function(*inputs)`, nothing recorded.

    >>> run_eagerly("double", lambda x: (2 * x,), torch.ones(2))
    (tensor([2., 2.]),)
    """
    return function(*inputs)


class Recording(Generic[Result]):
    """A function on inputs of fixed shapes as a CUDA graph.

    The graph contains memory addresses, so everything that `function` reads besides its inputs must stay in
    place: the function is kept, and with it what it refers to.

    Args:
        function: of tensors; None stays None.
        inputs: of the shapes and kinds to record.
        warm_up: runs before recording, so that libraries have chosen kernels and allocated memory.
        pool: memory shared with other recordings.
        error_mode: of `torch.cuda.graph`; "thread_local": only this thread's calls belong to the recording,
            other threads may load adapters meanwhile.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        inputs: Inputs,
        *,
        warm_up: int = 2,
        pool: Any = None,
        error_mode: str = "thread_local",
    ) -> None:
        self.function = function
        self.places = [
            None if one is None else one.clone(memory_format=torch.contiguous_format) for one in inputs
        ]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_up):
                function(*self.places)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode=error_mode):
            self.results = function(*self.places)

    def __call__(self, inputs: Inputs) -> Result:
        """Its results for inputs [b, ...] with b up to the recorded size; the next call overwrites them."""
        for place, one in zip(self.places, inputs, strict=True):
            if place is not None and one is not None:
                place[: len(one)].copy_(one)
        self.graph.replay()
        return self.results


class Recorder:
    """Runs functions eagerly the first time a batch size comes, recorded from the second time on.

    Within `record_immediately` a size is recorded the first time: a server records before requests come.
    On a CPU, with gradients on, and for batches larger than the largest bucket everything runs eagerly.

    Args:
        buckets: batch sizes to record, ascending.
        limit: number of recordings kept.
        record: makes a recording of a function from inputs of a bucket's size.
    """

    def __init__(
        self,
        buckets: Sequence[int] = BUCKETS,
        limit: int = _LIMIT,
        record: Callable[[Callable[..., Any], Inputs], Callable[[Inputs], Any]] | None = None,
    ) -> None:
        self.buckets, self.limit = tuple(buckets), limit
        self._record = record
        self._pool: Any = None
        self._immediately = False
        self._lock = threading.RLock()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._kept: OrderedDict[Hashable, Callable[[Inputs], Any]] = OrderedDict()

    def __len__(self) -> int:
        """Number of recordings."""
        return len(self._kept)

    def records(self, device: torch.device) -> bool:
        """Whether anything is recorded for tensors of a device."""
        return self._record is not None or device.type == "cuda"

    def sizes(self, largest: int) -> tuple[int, ...]:
        """The recorded sizes that batches of 1 to `largest` are padded to."""
        return tuple(
            size for before, size in zip((0, *self.buckets), self.buckets, strict=False) if before < largest
        )

    @contextmanager
    def record_immediately(self) -> Iterator[None]:
        """Within this block a batch size is recorded the first time it comes."""
        self._immediately = True
        try:
            yield
        finally:
            self._immediately = False

    def __call__(self, key: Hashable, function: Callable[..., Tensors], *inputs: Tensor | None) -> Tensors:
        """`function(*inputs)`, replayed where it was recorded.

        Args:
            key: names the function and everything it reads besides its inputs.
            function: from tensors [B, ...] to tensors [B, ...] whose rows do not depend on each other.
            inputs: tensors [B, ...], or None.
        """
        tensors = [one for one in inputs if one is not None]
        rows = len(tensors[0])
        bucket = next((size for size in self.buckets if size >= rows), None)
        if bucket is None or rows == 0 or torch.is_grad_enabled() or not self._usable(tensors):
            return function(*inputs)
        kinds = tuple(None if one is None else (one.shape[1:], one.dtype, one.device) for one in inputs)
        place = (key, bucket, kinds)
        # Tensors made in inference mode could not be written to outside of it.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if place not in self._kept:
                if place not in self._seen and not self._immediately:
                    self._seen[place] = None
                    while len(self._seen) > 8 * self.limit:
                        self._seen.popitem(last=False)
                    return function(*inputs)
                padded = [None if one is None else _padded(one, bucket) for one in inputs]
                self._kept[place] = self._recording(function, padded, tensors[0].device)
                while len(self._kept) > self.limit:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(place)
            results: Tensors = self._kept[place](inputs)
            return _like(results, [None if one is None else one[:rows].clone() for one in results])

    def _usable(self, inputs: Sequence[Tensor]) -> bool:
        if self._record is not None:
            return True
        return all(one.is_cuda for one in inputs) and not torch.cuda.is_current_stream_capturing()

    def _recording(
        self, function: Callable[..., Any], inputs: Inputs, device: torch.device
    ) -> Callable[[Inputs], Any]:
        if self._record is not None:
            return self._record(function, inputs)
        with torch.cuda.device(device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            try:
                return Recording(function, inputs, pool=self._pool)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # an operation that cannot be recorded
                warnings.warn(
                    f"inference runs unrecorded, and slower in small batches: {error}", stacklevel=2
                )
                return lambda batch: function(*batch)

    def __deepcopy__(self, memo: object) -> Recorder:
        """Recordings belong to one backbone: a copy begins without any."""
        return Recorder(self.buckets, self.limit, self._record)

    def __reduce__(self) -> tuple[type[Recorder], tuple[Sequence[int], int]]:
        """Recordings stay in their process."""
        return Recorder, (self.buckets, self.limit)


def _like(results: Tensors, parts: Sequence[Tensor | None]) -> Tensors:
    """Parts as a tuple of the same kind: a NamedTuple keeps its names."""
    make = getattr(type(results), "_make", type(results))  # of a NamedTuple
    copied: Tensors = make(parts)
    return copied


def _padded(one: Tensor, rows: int) -> Tensor:
    """A tensor [B, ...] with its first row repeated to [rows, ...]."""
    return torch.cat([one, one[:1].expand(rows - len(one), *one.shape[1:])])
