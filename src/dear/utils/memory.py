"""Freed memory, returned to the system or kept for reuse."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LARGEST_REUSED = 31 << 20  #: bytes, see `reuse_freed_memory`
_M_ARENA_MAX = -8  # of mallopt(3)


def reuse_freed_memory() -> None:
    """Make glibc reuse freed blocks of up to `LARGEST_REUSED` bytes instead of returning them to the system.

    Pages of a block that comes from the system are cleared by the kernel one by one, which takes longer than
    reading a file into them. Once a block of nearly 32 MB is freed, glibc keeps blocks up to that size; the
    one freed here is never written to.
    """
    bytes(LARGEST_REUSED)


@contextmanager
def trim_memory(seconds: float = 15.0) -> Iterator[None]:
    """Within this context, return freed memory to the system every few seconds.

    The C library of Linux keeps one pool of freed memory per thread, so that a server with many threads
    seems to grow forever. Elsewhere this does nothing.
    """
    try:
        library = ctypes.CDLL(None)
        limit, trim = library.mallopt, library.malloc_trim
    except (OSError, TypeError, AttributeError):
        yield
        return
    limit(_M_ARENA_MAX, 2)
    done = threading.Event()

    def work() -> None:
        while not done.wait(seconds):
            trim(0)

    thread = threading.Thread(target=work, name="dear-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
