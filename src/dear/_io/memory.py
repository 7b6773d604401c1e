"""Out of memory: smaller batches where that changes no answer, otherwise an error that says what to do."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from dear.errors import OutOfMemory

Result = TypeVar("Result")
_log = logging.getLogger("dear")
_M_ARENA_MAX = -8  # of mallopt(3)


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or in the computer.

    >>> ran_out(torch.OutOfMemoryError("CUDA out of memory")), ran_out(MemoryError()), ran_out(ValueError())
    (True, True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # PyTorch on the CPU


@contextmanager
def oom_as_error(sentence: Callable[[], str], hint: str | None = None) -> Iterator[None]:
    """Turn running out of memory into an error with this sentence; `hint` as in `DearError`.

    Raises:
        OutOfMemory: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise OutOfMemory(sentence(), hint=hint) from error


@contextmanager
def tidy(seconds: float = 15.0) -> Iterator[None]:
    """For a server: return memory that its threads freed to the system every few seconds.

    The C library of Linux keeps one pool per thread and what was freed in it, so that a server of many
    threads seems to grow for ever. Elsewhere this does nothing.
    """
    try:
        library = ctypes.CDLL(None)
        limit, give_back = library.mallopt, library.malloc_trim
    except (OSError, TypeError, AttributeError):
        yield
        return
    limit(_M_ARENA_MAX, 2)
    done = threading.Event()

    def work() -> None:
        while not done.wait(seconds):
            give_back(0)

    thread = threading.Thread(target=work, name="dear-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def in_batches(work: Callable[[range], Result], count: int, batch: int) -> Iterator[tuple[range, Result]]:
    """`work` of the rows 0 to `count` - 1, a batch at a time; when memory runs out, batches are halved.

    For work whose answer for a row does not depend on the other rows. Halving is told by a warning of the
    logger "dear", which stands on standard error unless the program says otherwise.

    Yields:
        the rows of a batch and what `work` made of them.

    Raises:
        OutOfMemory: not even one row fits.

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
            _log.warning("dear: out of memory with %d images at once; going on with %d", len(rows), batch)
        else:
            yield rows, result
            start = rows.stop
            continue
        if torch.cuda.is_available():  # only now: the error held on to the tensors of the failed batch
            torch.cuda.empty_cache()
