"""Work on many images: in threads, and in batches that shrink when memory runs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from dear.errors import OutOfMemory, UsageError, is_out_of_memory

CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
MAX_THREADS = 12  #: of `map_threads`
Item = TypeVar("Item")
Result = TypeVar("Result")


def map_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`function` of every item, computed by several threads: image decoders release Python's lock.

    If it fails for an item, no further items are started, and the error of the first failed item is raised.
    """
    workers = min(len(items), usable_cores(), MAX_THREADS)
    if workers < 2:
        return [function(item) for item in items]
    results: dict[int, Result] = {}
    failed: dict[int, BaseException] = {}
    indices = iter(range(len(items)))  # all threads take from it: a future per item would cost more

    def work() -> None:
        for index in indices:
            if failed:
                return
            try:
                results[index] = function(items[index])
            except BaseException as error:
                failed[index] = error

    with ThreadPoolExecutor(workers) as pool:
        for worker in [pool.submit(work) for _ in range(workers)]:
            worker.result()
    if failed:
        raise failed[min(failed)]
    return [results[index] for index in range(len(items))]


def usable_cores() -> int:
    """Number of cores that this process may use, by its affinity mask and the CPU limit of its container."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS or Windows
        cores = os.cpu_count() or 1
    return min(cores, cpu_limit() or cores)


def cpu_limit(path: Path = CGROUP_CPU) -> int | None:
    """Number of cores that the container (cgroup v2) may use, at least 1; None: no limit below the machine's.

    >>> cpu_limit(Path("no such file")) is None
    True
    """
    try:
        quota, period = path.read_text().split()[:2]
        cores = max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None
    return cores if cores < (os.cpu_count() or 1) else None


def let_waiting_threads_sleep() -> None:
    """Threads of a computation that wait for each other sleep soon, so that other programs get their cores.

    To be called before PyTorch is imported. On Linux it computes by GNU's OpenMP, whose threads otherwise
    spin ten times as long: beside programs that use the same cores, a command then takes three times as long.
    The user's own settings of OpenMP are kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")


def in_batches(work: Callable[[range], Result], count: int, batch: int) -> Iterator[tuple[range, Result]]:
    """`work` of the rows 0 to `count` - 1, a batch at a time; when memory runs out, batches are halved.

    The result of a row must not depend on other rows. Yields the rows of each batch and the result of `work`;
    the logger "dear" warns when a batch is halved.

    Raises:
        UsageError: the batch size is below 1.
        OutOfMemory: one row does not fit into memory.

    >>> [result for _, result in in_batches(lambda rows: list(rows), 5, 2)]
    [[0, 1], [2, 3], [4]]
    """
    if batch < 1:
        raise UsageError(f"batch must be at least 1, got {batch}")
    start = 0
    while start < count:
        rows = range(start, min(start + batch, count))
        try:
            result = work(rows)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if len(rows) == 1:
                raise OutOfMemory(
                    "one image does not fit into memory; use a smaller backbone or another device",
                    hint="device",
                ) from error
            batch = len(rows) // 2
            logging.getLogger("dear").warning(
                "notice: out of memory with %d images per batch; continuing with %d", len(rows), batch
            )
        else:
            yield rows, result
            start = rows.stop
            continue
        import torch

        if torch.cuda.is_available():  # only now: the error referred to the tensors of the failed batch
            torch.cuda.empty_cache()
