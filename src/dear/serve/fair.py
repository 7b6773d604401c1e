"""A queue that is fair between callers: whoever has used least is served next, weighted by cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_MOST_REMEMBERED = 1024  # callers without waiting items whose use is remembered


class FairQueue(Generic[T]):
    """Start-time fair queueing. Not thread-safe: its owner holds a lock.

    A caller that comes back after a pause starts level with those who are being served: time that it did not
    use is not saved up.

    >>> queue = FairQueue()
    >>> for item in ("a1", "a2", "a3"):
    ...     queue.put("a", 1, item)
    >>> queue.put("b", 1, "b1")
    >>> [queue.take() for _ in range(5)]
    ['a1', 'b1', 'a2', 'a3', None]
    """

    def __init__(self) -> None:
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
            self._used[caller] = max(self._used.get(caller, 0.0), self._now)
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
            if len(self._used) > _MOST_REMEMBERED:
                self._used = {
                    name: used for name, used in self._used.items() if name in self._lines or used > self._now
                }
            return item
        return None

    def clear(self) -> list[T]:
        """All items, in no particular order; the queue is empty afterwards."""
        left = [item for line in self._lines.values() for _, item in line]
        self._lines.clear()
        self._count = 0
        return left
