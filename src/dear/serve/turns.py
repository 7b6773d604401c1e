"""Turns at the device and the decoders: which caller is next, and how much one turn computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_MOST_REMEMBERED = 1024  # callers without waiting items whose use is remembered
TURN_SECONDS = 0.2  #: that one turn at the device should take at most
_SMOOTHING = 0.7  # weight of the former estimate when a turn is recorded


class FairQueue(Generic[T]):
    """The caller that has used least is served next, weighted by cost (start-time fair queueing).

    Not thread-safe: its owner holds a lock.

    Use is counted since the queue was last empty. A caller that comes back after a pause has up to `credit`
    less than those who are being served: so much of what it did not use is saved up.

    >>> queue = FairQueue()
    >>> for item in ("a1", "a2", "a3"):
    ...     queue.put("a", 1, item)
    >>> queue.put("b", 1, "b1")
    >>> [queue.take() for _ in range(5)]
    ['a1', 'b1', 'a2', 'a3', None]
    """

    def __init__(self, credit: float = 0.0) -> None:
        self._credit = credit
        self._waiting: dict[str, deque[tuple[float, T]]] = {}
        self._used: dict[str, float] = {}
        self._now = 0.0
        self._count = 0

    def __len__(self) -> int:
        """Items that wait."""
        return self._count

    def put(self, caller: str, cost: float, item: T) -> None:
        """Add an item at the end of a caller's line."""
        waiting = self._waiting.get(caller)
        if waiting is None:
            waiting = self._waiting[caller] = deque()
            self._used[caller] = max(self._used.get(caller, 0.0), self._now - self._credit)
        waiting.append((cost, item))
        self._count += 1

    def take(self, fits: Callable[[T], bool] | None = None) -> T | None:
        """The first item of the caller that has used least; callers whose first item does not fit wait."""
        for caller in sorted(self._waiting, key=self._used.__getitem__):
            waiting = self._waiting[caller]
            cost, item = waiting[0]
            if fits is not None and not fits(item):
                continue
            waiting.popleft()
            self._count -= 1
            self._now = max(self._now, self._used[caller])
            self._used[caller] += cost
            if not waiting:
                del self._waiting[caller]
            if not self._count:
                self._used.clear()
            elif len(self._used) > _MOST_REMEMBERED:
                self._used = {
                    name: used
                    for name, used in self._used.items()
                    if name in self._waiting or used > self._now - self._credit
                }
            return item
        return None

    def clear(self) -> list[T]:
        """All items, in no particular order; the queue is empty afterwards."""
        items = [item for waiting in self._waiting.values() for _, item in waiting]
        self._waiting.clear()
        self._count = 0
        return items


class Pace:
    """How many pieces are computed at once, so that others do not wait long on a slow machine.

    Learns how many seconds one piece takes. A first turn takes `first` pieces, or as many as it may (None);
    later ones at least `least`. Processor time counts: where other programs have the processors, smaller
    turns would only cost more.

    >>> pace = Pace()
    >>> pace.pieces(8)
    8
    >>> pace.record(8, 0.8)
    >>> pace.pieces(8)
    2
    """

    def __init__(self, turn_seconds: float = TURN_SECONDS, least: int = 1, first: int | None = None) -> None:
        self._turn, self._least, self._first = turn_seconds, least, first
        self._each = 0.0  # seconds that one piece takes; 0: not known yet

    def pieces(self, most: int) -> int:
        """How many pieces to take."""
        if not self._each:
            return most if self._first is None else min(most, self._first)
        return min(most, max(self._least, int(self._turn / self._each)))

    def record(self, pieces: int, seconds: float) -> None:
        """Record how long some pieces took."""
        each = seconds / max(1, pieces)
        self._each = _SMOOTHING * self._each + (1 - _SMOOTHING) * each if self._each else each

    def measure(self, pieces: int, function: Callable[[], T]) -> T:
        """Call a function that computes some pieces, and record its processor time."""
        began = time.thread_time()
        try:
            return function()
        finally:
            self.record(pieces, time.thread_time() - began)
