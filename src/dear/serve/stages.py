"""Where the time of a request goes, by stage: for log lines, metrics and the header `Server-Timing`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_seconds: ContextVar[dict[str, float] | None] = ContextVar("dear_stages", default=None)


@contextmanager
def collect_stages() -> Iterator[dict[str, float]]:
    """Collect the stages of one request: seconds by name, in the order in which they ended."""
    seconds: dict[str, float] = {}
    before = _seconds.set(seconds)
    try:
        yield seconds
    finally:
        _seconds.reset(before)


def add_stage(name: str, seconds: float) -> None:
    """Add time to a stage of the current request; without a request nothing happens."""
    stages = _seconds.get()
    if stages is not None:
        stages[name] = stages.get(name, 0.0) + seconds


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Add the time of a block."""
    began = time.perf_counter()
    try:
        yield
    finally:
        add_stage(name, time.perf_counter() - began)


def add_split(first: str, second: str, began: float, between: float | None) -> None:
    """Add two stages in a row, by `time.perf_counter`; the second ends now, or never began (None)."""
    now = time.perf_counter()
    add_stage(first, (now if between is None else between) - began)
    if between is not None:
        add_stage(second, now - between)


def server_timing(seconds: dict[str, float]) -> bytes:
    """The value of the header `Server-Timing`, in milliseconds.

    >>> server_timing({"read": 0.001, "decode": 0.02})
    b'read;dur=1.0, decode;dur=20.0'
    """
    return ", ".join(f"{name};dur={1000 * value:.1f}" for name, value in seconds.items()).encode()
