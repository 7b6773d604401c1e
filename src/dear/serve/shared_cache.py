"""What several requests need, class lists and galleries: computed once, cached within bounds."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
MOST_ABANDONED = 16  #: computations that go on although nobody waits for them


class Sized(NamedTuple, Generic[V]):
    """A value and what it counts against each bound."""

    value: V
    size: tuple[int, ...]


@dataclass
class _Computation(Generic[V]):
    task: asyncio.Task[V]
    waiters: int = 0


class SharedCache(Generic[K, V]):
    """Values by key, within `bounds` on the sums of their sizes; all methods are called on one event loop.

    Beyond a bound the caller with the largest last size loses its least recently used value, so that a caller
    with many values evicts its own. A value that exceeds a bound by itself is computed, but not cached.

    One task computes a value for all requests of a caller. It goes on when they give up, so that the next
    attempt finds more of it done, and it is never canceled while one waits. Each caller has a task of its
    own: values are computed in their caller's turns, and nobody waits for the turns of somebody else.
    Failures are not cached.
    """

    def __init__(self, *bounds: int) -> None:
        self._bounds = bounds
        self._cached: OrderedDict[K, tuple[str, Sized[V]]] = OrderedDict()  # with the caller who paid
        self._computations: dict[tuple[str, K], _Computation[V]] = {}

    def __len__(self) -> int:
        """Number of cached values."""
        return len(self._cached)

    @property
    def computing(self) -> int:
        """Number of values that are being computed."""
        return len(self._computations)

    def find(self, key: K) -> V | None:
        """The cached value, which becomes the most recently used one; None where there is none."""
        if key not in self._cached:
            return None
        self._cached.move_to_end(key)
        return self._cached[key][1].value

    async def get(self, key: K, caller: str, compute: Callable[[], Coroutine[Any, Any, Sized[V]]]) -> V:
        """The value; `compute` is called unless it is cached or being computed for the caller."""
        value = self.find(key)
        if value is not None:
            return value
        computation = self._computations.get((caller, key))
        if computation is None:
            computation = _Computation(asyncio.create_task(self._compute(key, caller, compute)))
            self._computations[caller, key] = computation
            computation.task.add_done_callback(lambda _: self._end(caller, key, computation))
        computation.waiters += 1
        try:
            return await asyncio.shield(computation.task)
        finally:
            computation.waiters -= 1
            abandoned = [name for name, one in self._computations.items() if not one.waiters]
            for name in abandoned[:-MOST_ABANDONED]:
                self._computations.pop(name).task.cancel()

    async def _compute(self, key: K, caller: str, compute: Callable[[], Coroutine[Any, Any, Sized[V]]]) -> V:
        computed = await compute()
        if self._exceeds([computed]):
            return computed.value
        self._cached[key] = (caller, computed)
        self._cached.move_to_end(key)
        while self._exceeds(one for _, one in self._cached.values()):
            used: Counter[str] = Counter()
            for owner, one in self._cached.values():
                used[owner] += one.size[-1]
            largest = max(used, key=used.__getitem__)
            del self._cached[next(old for old, (owner, _) in self._cached.items() if owner == largest)]
        return computed.value

    def _exceeds(self, values: Iterable[Sized[V]]) -> bool:
        sums = map(sum, zip(*(one.size for one in values), strict=True))
        return any(total > most for total, most in zip(sums, self._bounds, strict=False))

    def _end(self, caller: str, key: K, computation: _Computation[V]) -> None:
        """The task has ended: the next request finds the value in the cache, or tries again."""
        if self._computations.get((caller, key)) is computation:
            del self._computations[caller, key]
        if not computation.task.cancelled():
            computation.task.exception()  # asyncio would log one that nobody has waited for

    def discard(self, is_old: Callable[[K], bool]) -> None:
        """Remove cached values by their keys; requests that use them keep them."""
        for key in [key for key in self._cached if is_old(key)]:
            del self._cached[key]

    def close(self) -> None:
        """Cancel what is being computed; from any thread."""
        for computation in list(self._computations.values()):
            if not computation.task.done():
                computation.task.get_loop().call_soon_threadsafe(computation.task.cancel)
