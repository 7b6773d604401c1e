"""A cache whose size is bounded, fair between callers."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Cache(Generic[V]):
    """Values by key, of sizes that sum up to `most` at most; from any thread.

    Beyond that the caller with most loses its least recently used value, so that a caller with many values
    evicts its own. A value that is larger than `most` is not cached.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._caller_of: dict[Hashable, str] = {}
        self._values: dict[str, OrderedDict[Hashable, tuple[V, int]]] = {}  # by caller, then by key
        self._sizes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of values."""
        return len(self._caller_of)

    def find(self, key: Hashable) -> V | None:
        """The value, marked as used; None where there is none."""
        with self._lock:
            if key not in self._caller_of:
                return None
            values = self._values[self._caller_of[key]]
            values.move_to_end(key)
            return values[key][0]

    def put(self, key: Hashable, caller: str, value: V, size: int = 1) -> None:
        """Cache a value for everybody; its size counts against the caller."""
        with self._lock:
            if key in self._caller_of:
                self._remove(key)
            if size > self._most:
                return
            self._caller_of[key] = caller
            self._values.setdefault(caller, OrderedDict())[key] = value, size
            self._sizes[caller] += size
            while self._sizes.total() > self._most:
                largest = max(self._sizes, key=self._sizes.__getitem__)
                self._remove(next(iter(self._values[largest])))

    def _remove(self, key: Hashable) -> None:
        caller = self._caller_of.pop(key)
        _, size = self._values[caller].pop(key)
        self._sizes[caller] -= size
        if not self._values[caller]:
            del self._values[caller], self._sizes[caller]
