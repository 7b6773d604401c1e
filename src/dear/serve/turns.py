"""Turns at the device and the decoders: which caller is next, and how much one turn computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_MOST_REMEMBERED = 1024  # callers without waiting items whose use is remembered
TURN_SECONDS = 0.2  #: that one turn at the device should take at most
_MEMORY = 0.7  # share of what was known that stays when a turn is seen


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
        self._lines: dict[str, deque[tuple[float, T]]] = {}
        self._used: dict[str, float] = {}
        self._now = 0.0
        self._count = 0

    def __len__(self) -> int:
        """Items that wait."""
        return self._count

    def put(self, caller: str, cost: float, item: T) -> None:
        """Add an item at the end of a caller's line."""
        line = self._lines.get(caller)
        if line is None:
            line = self._lines[caller] = deque()
            self._used[caller] = max(self._used.get(caller, 0.0), self._now - self._credit)
        line.append((cost, item))
        self._count += 1

    def take(self, fits: Callable[[T], bool] | None = None) -> T | None:
        """The first item of the caller that has used least; callers whose first item does not fit wait."""
        for caller in sorted(self._lines, key=self._used.__getitem__):
            line = self._lines[caller]
            cost, item = line[0]
            if fits is not None and not fits(item):
                continue
            line.popleft()
            self._count -= 1
            self._now = max(self._now, self._used[caller])
            self._used[caller] += cost
            if not line:
                del self._lines[caller]
            if not self._count:
                self._used.clear()
            elif len(self._used) > _MOST_REMEMBERED:
                self._used = {
                    name: used
                    for name, used in self._used.items()
                    if name in self._lines or used > self._now - self._credit
                }
            return item
        return None

    def clear(self) -> list[T]:
        """All items, in no particular order; the queue is empty afterwards."""
        items = [item for line in self._lines.values() for _, item in line]
        self._lines.clear()
        self._count = 0
        return items


class Pace:
    """How many pieces are computed at once, so that others do not wait long on a slow machine.

    Learns how long one piece takes. A first turn takes `first` pieces, or as many as it may (None); later
    ones at least `least`.
    Processor time counts: where other programs have the processors, smaller turns would only cost more.

    >>> pace = Pace()
    >>> pace.pieces(8)
    8
    >>> pace.took(8, 0.8)
    >>> pace.pieces(8)
    2
    """

    def __init__(self, turn_seconds: float = TURN_SECONDS, least: int = 1, first: int | None = None) -> None:
        self._turn, self._least, self._first, self._each = turn_seconds, least, first, 0.0

    def pieces(self, most: int) -> int:
        """How many pieces to take."""
        if not self._each:
            return most if self._first is None else min(most, self._first)
        return most if self._each * most <= self._turn else max(self._least, int(self._turn / self._each))

    def took(self, pieces: int, seconds: float) -> None:
        """Note how long some pieces took."""
        each = seconds / max(1, pieces)
        self._each = each if not self._each else _MEMORY * self._each + (1 - _MEMORY) * each

    def timed(self, pieces: int, function: Callable[[], T]) -> T:
        """Call a function that computes some pieces, and note how long it computed."""
        began = time.thread_time()
        try:
            return function()
        finally:
            self.took(pieces, time.thread_time() - began)
