"""Adapters on the class lists that requests name: each list is prepared once and cached within bounds."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from dear.serve.engine import Answerer

Key = tuple[str, str, tuple[str, ...]]  #: name and version of the adapter, classes
MOST_LISTS = 256
MOST_CLASSES = 16_000
MOST_BYTES = 256 * 2**20
_MOST_ABANDONED = 16  # lists that are prepared although nobody waits for them any longer


@dataclass(frozen=True)
class ClassList:
    """An adapter on other classes, with their texts encoded."""

    answerer: Answerer
    bytes: int  #: of the tensors that it does not share with the adapter


@dataclass
class _Preparation:
    task: asyncio.Task[ClassList]
    waiters: int = 0


class ClassLists:
    """Prepared class lists, bounded in number, classes and bytes.

    Beyond a bound the caller whose lists have most bytes loses its least recently used one: a caller with
    many lists evicts its own.

    One task prepares a list for all requests of a caller that wait for it. It goes on when they give up, so
    that the next attempt finds more of it done. Each caller has its own task, because a list is prepared in
    its caller's turns: nobody waits for the turns of somebody else. Failures are not cached.

    All methods are called on one event loop.

    Args:
        most_lists: number of cached lists.
        most_classes: number of classes in all cached lists.
        most_bytes: bytes of all cached lists. A list beyond one of these bounds is prepared, but not cached.
    """

    def __init__(
        self, most_lists: int = MOST_LISTS, most_classes: int = MOST_CLASSES, most_bytes: int = MOST_BYTES
    ) -> None:
        self._bounds = (most_lists, most_classes, most_bytes)
        self._cached: OrderedDict[Key, tuple[str, ClassList]] = OrderedDict()  # with the caller who paid
        self._preparations: dict[tuple[str, Key], _Preparation] = {}

    def __len__(self) -> int:
        """Number of cached lists."""
        return len(self._cached)

    @property
    def preparing(self) -> int:
        """Number of lists that are being prepared."""
        return len(self._preparations)

    def find(self, key: Key) -> Answerer | None:
        """The cached list, which becomes the most recently used one; None where there is none."""
        if key not in self._cached:
            return None
        self._cached.move_to_end(key)
        return self._cached[key][1].answerer

    async def prepare(
        self, key: Key, caller: str, prepare: Callable[[], Coroutine[Any, Any, ClassList]]
    ) -> Answerer:
        """Wait for a list that is not cached; `prepare` is called unless the caller's task is under way."""
        preparation = self._preparations.get((caller, key))
        if preparation is None:
            preparation = _Preparation(asyncio.create_task(self._prepare(key, caller, prepare)))
            self._preparations[caller, key] = preparation
            preparation.task.add_done_callback(lambda _: self._forget(caller, key, preparation))
        preparation.waiters += 1
        try:
            return (await asyncio.shield(preparation.task)).answerer
        finally:
            preparation.waiters -= 1
            self._cancel_abandoned()

    async def _prepare(
        self, key: Key, caller: str, prepare: Callable[[], Coroutine[Any, Any, ClassList]]
    ) -> ClassList:
        prepared = await prepare()
        self._keep(key, caller, prepared)
        return prepared

    def _keep(self, key: Key, caller: str, prepared: ClassList) -> None:
        """Cache a list if it fits at all."""
        if self._exceeds({key: (caller, prepared)}):
            return
        self._cached[key] = (caller, prepared)
        self._cached.move_to_end(key)
        while self._exceeds(self._cached):
            used: Counter[str] = Counter()
            for owner, one in self._cached.values():
                used[owner] += one.bytes
            largest = max(used, key=used.__getitem__)
            del self._cached[next(old for old, (owner, _) in self._cached.items() if owner == largest)]

    def _exceeds(self, lists: Mapping[Key, tuple[str, ClassList]]) -> bool:
        classes = sum(len(names) for _, _, names in lists)
        used = (len(lists), classes, sum(one.bytes for _, one in lists.values()))
        return any(amount > most for amount, most in zip(used, self._bounds, strict=True))

    def _forget(self, caller: str, key: Key, preparation: _Preparation) -> None:
        """The task has ended: the next request finds the list in the cache, or tries again."""
        if self._preparations.get((caller, key)) is preparation:
            del self._preparations[caller, key]
        if not preparation.task.cancelled():
            preparation.task.exception()  # asyncio would log one that nobody has waited for

    def _cancel_abandoned(self) -> None:
        """Cancel the oldest tasks that nobody waits for where there are too many of them."""
        abandoned = [name for name, one in self._preparations.items() if not one.waiters]
        for name in abandoned[:-_MOST_ABANDONED]:
            self._preparations.pop(name).task.cancel()
