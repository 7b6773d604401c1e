"""Work on many images: in threads, and in batches that shrink when memory runs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from dear.errors import OutOfMemory, ran_out

CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
MOST_THREADS = 12  #: that work side by side
Item = TypeVar("Item")
Result = TypeVar("Result")


def threaded(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`function` of every item, computed by several threads: image decoders release Python's lock.

    Where it fails for some items, no further ones are begun, and the error of the first of them is raised.
    """
    workers = min(len(items), usable_cores(), MOST_THREADS)
    if workers < 2:
        return [function(item) for item in items]
    results: dict[int, Result] = {}
    failed: dict[int, BaseException] = {}
    places = iter(range(len(items)))  # that all threads take from: a future for each would cost more

    def work() -> None:
        for place in places:
            if failed:
                return
            try:
                results[place] = function(items[place])
            except BaseException as error:
                failed[place] = error

    with ThreadPoolExecutor(workers) as pool:
        for worker in [pool.submit(work) for _ in range(workers)]:
            worker.result()
    if failed:
        raise failed[min(failed)]
    return [results[place] for place in range(len(items))]


def usable_cores() -> int:
    """Cores that this process may use: those of its affinity mask, within the CPU limit of its container."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS or Windows
        cores = os.cpu_count() or 1
    return min(cores, cpu_limit() or cores)


def cpu_limit(path: Path = CGROUP_CPU) -> int | None:
    """Cores that the container (cgroup v2) may use, at least 1; None: no limit below the machine's cores.

    >>> cpu_limit(Path("no such file")) is None
    True
    """
    try:
        quota, period = path.read_text().split()[:2]
        cores = max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None
    return cores if cores < (os.cpu_count() or 1) else None


def in_batches(work: Callable[[range], Result], count: int, batch: int) -> Iterator[tuple[range, Result]]:
    """`work` of the rows 0 to `count` - 1, a batch at a time; when memory runs out, batches are halved.

    For work whose answer for a row does not depend on the other rows. Yields the rows of a batch and what
    `work` returned for them; the logger "dear" warns when a batch is halved.

    >>> [result for _, result in in_batches(lambda rows: list(rows), 5, 2)]
    [[0, 1], [2, 3], [4]]
    """
    start = 0
    while start < count:
        rows = range(start, min(start + batch, count))
        try:
            result = work(rows)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            if len(rows) == 1:
                raise OutOfMemory(
                    "not even one image at a time fits into memory; use a smaller backbone or another device",
                    hint="device",
                ) from error
            batch = len(rows) // 2
            logging.getLogger("dear").warning(
                "dear: out of memory with %d images at once; going on with %d", len(rows), batch
            )
        else:
            yield rows, result
            start = rows.stop
            continue
        import torch

        if torch.cuda.is_available():  # only now: the error held on to the tensors of the failed batch
            torch.cuda.empty_cache()
