"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_M_ARENA_MAX = -8  # of mallopt(3)


@contextmanager
def given_back(seconds: float = 15.0) -> Iterator[None]:
    """Return memory that a server's threads freed to the system every few seconds.

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
