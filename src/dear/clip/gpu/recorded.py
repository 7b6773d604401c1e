"""Inference recorded once per batch size and replayed, because launching a small batch dominates its time.

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
_LIMIT = 128  # recordings kept; the least recently used one is dropped


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

    The graph contains memory addresses, so everything that `function` reads must keep its address: the
    function is kept, and with it everything it refers to.

    Args:
        function: of tensors; None stays None.
        inputs: of the shapes and types to record.
        warm_up: number of runs before recording, in which libraries choose kernels and allocate memory.
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
        self.inputs = [
            None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)
            for tensor in inputs
        ]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_up):
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with (
            _random_numbers_survive(),
            torch.cuda.graph(self.graph, pool=pool, capture_error_mode=error_mode),
        ):
            self.results = function(*self.inputs)

    def __call__(self, inputs: Inputs) -> Result:
        """The results for inputs [b, ...] with b up to the recorded size; the next call overwrites them."""
        for recorded, tensor in zip(self.inputs, inputs, strict=True):
            if recorded is not None and tensor is not None:
                recorded[: len(tensor)].copy_(tensor)
        self.graph.replay()
        return self.results


@contextmanager
def _random_numbers_survive() -> Iterator[None]:
    """If recording fails in this block, the GPU's random numbers go on, and the error is the first one.

    PyTorch leaves the generator within the recording, where it refuses to draw or to be set, and reports
    that the recording could not end instead of why.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.get_state()
    try:
        yield
    except RuntimeError as error:
        renewed = torch.Generator(generator.device)
        renewed.set_state(before)
        generator.graphsafe_set_state(renewed.graphsafe_get_state())
        first = error.__context__
        raise (first if isinstance(first, RuntimeError | KeyboardInterrupt) else error) from None


class Recorder:
    """Runs functions eagerly at the first batch of a size, and recorded from the second on.

    Within `record_immediately` a size is recorded at once: a server records before requests arrive. On a CPU,
    with gradients enabled, and for batches above the largest bucket everything runs eagerly.

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
        self._recordings: OrderedDict[Hashable, Callable[[Inputs], Any]] = OrderedDict()

    def __len__(self) -> int:
        """Number of recordings."""
        return len(self._recordings)

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
        """Within this block a batch size is recorded at its first batch."""
        self._immediately = True
        try:
            yield
        finally:
            self._immediately = False

    def __call__(self, key: Hashable, function: Callable[..., Tensors], *inputs: Tensor | None) -> Tensors:
        """`function(*inputs)`, replayed if it was recorded.

        Args:
            key: names the function and everything it reads besides its inputs.
            function: from tensors [B, ...] to tensors [B, ...] whose rows do not depend on each other.
            inputs: tensors [B, ...], or None.
        """
        tensors = [tensor for tensor in inputs if tensor is not None]
        rows = len(tensors[0])
        bucket = next((size for size in self.buckets if size >= rows), None)
        if bucket is None or rows == 0 or torch.is_grad_enabled() or not self._usable(tensors):
            return function(*inputs)
        types = tuple(
            None if tensor is None else (tensor.shape[1:], tensor.dtype, tensor.device) for tensor in inputs
        )
        slot = (key, bucket, types)
        # Tensors created in inference mode cannot be written outside of it.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if slot not in self._recordings:
                if slot not in self._seen and not self._immediately:
                    self._seen[slot] = None
                    while len(self._seen) > 8 * self.limit:
                        self._seen.popitem(last=False)
                    return function(*inputs)
                padded = [None if tensor is None else _pad(tensor, bucket) for tensor in inputs]
                self._recordings[slot] = self._recording(function, padded, tensors[0].device)
                while len(self._recordings) > self.limit:
                    self._recordings.popitem(last=False)
            self._recordings.move_to_end(slot)
            results: Tensors = self._recordings[slot](inputs)
            return _with_type_of(
                results, [None if tensor is None else tensor[:rows].clone() for tensor in results]
            )

    def _usable(self, inputs: Sequence[Tensor]) -> bool:
        if self._record is not None:
            return True
        return all(tensor.is_cuda for tensor in inputs) and not torch.cuda.is_current_stream_capturing()

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
                self._pool = None  # PyTorch takes no other recording into the pool of a failed one
                warnings.warn(
                    f"inference runs unrecorded, and slower in small batches: {error}", stacklevel=2
                )
                return lambda batch: function(*batch)

    def __deepcopy__(self, memo: object) -> Recorder:
        """A recorder without recordings, because they belong to one backbone."""
        return Recorder(self.buckets, self.limit, self._record)

    def __reduce__(self) -> tuple[type[Recorder], tuple[Sequence[int], int]]:
        """Recordings are not pickled."""
        return Recorder, (self.buckets, self.limit)


def _with_type_of(results: Tensors, parts: Sequence[Tensor | None]) -> Tensors:
    """Parts as a tuple of the type of `results`, which may be a NamedTuple."""
    make = getattr(type(results), "_make", type(results))  # of a NamedTuple
    copied: Tensors = make(parts)
    return copied


def _pad(tensor: Tensor, rows: int) -> Tensor:
    """A tensor [B, ...] with its first row repeated to [rows, ...]."""
    return torch.cat([tensor, tensor[:1].expand(rows - len(tensor), *tensor.shape[1:])])
