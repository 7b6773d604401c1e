"""Adapters on the classes that requests name: each name is encoded once, in turns between batches of images.

A method encodes the texts of its classes with its first answer, all at once: a thousand new names would
occupy the device for seconds. Here the same method on some classes at a time computes the rows that the
method on all classes caches. Rows are cached by name: other lists find them, and a request continues where
another one gave up.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from dear.methods.base import Method
from dear.methods.class_rows import ClassRows
from dear.serve.batcher import TEXT_COST, Batcher
from dear.serve.cache import Cache
from dear.serve.engine import Answerer
from dear.serve.store import Adapter
from dear.serve.turns import TURN_SECONDS, Pace

FIRST_SLICE, LARGEST_SLICE = 16, 64  #: classes encoded at once, before and after their speed is known
_LEAST = 4  # on a slow machine: fewer at once cost more
_MOST_BYTES = 128 * 2**20  # of cached lists and rows
_LIST_BYTES, _ROW_BYTES = 32 * 2**10, 4 * 2**10  # of a list and of a row, in addition to their tensors
ADAPTERS = "(adapters)"  #: takes turns with callers: texts of adapters that are loaded


class ClassLists:
    """Adapters on other classes; texts are encoded in the queue of a batcher."""

    def __init__(self, batcher: Batcher[Any, Any], most_bytes: int = _MOST_BYTES) -> None:
        self._batcher = batcher
        self.pace = Pace(TURN_SECONDS / 2, least=_LEAST, first=FIRST_SLICE)  #: of texts
        self._builders = ThreadPoolExecutor(1, thread_name_prefix="dear-serve-classes")
        self.lists: Cache[Answerer] = Cache(most_bytes // 2)
        self.rows: Cache[ClassRows] = Cache(most_bytes // 2)  #: of one class each

    async def get(self, adapter: Adapter, classes: tuple[str, ...], caller: str) -> Answerer:
        """The adapter on some classes, with their texts encoded."""
        key = (adapter.card.name, adapter.card.version, classes)
        answerer = self.lists.find(key)
        if answerer is None:
            answerer = await self.build(adapter.on_classes, classes)
            rows = await self._encode(answerer, key[:2], caller, adapter.rows)
            self.lists.put(key, caller, answerer, _LIST_BYTES + sum(map(sys.getsizeof, classes)) + rows.bytes)
        return answerer

    async def prepare(self, adapter: Adapter) -> None:
        """Encode the texts of an adapter's own classes, whose first answer then encodes nothing.

        Whatever its cost, a slice counts as one image: answers wait for it.
        """
        if adapter.method.open_classes:
            version = adapter.card.name, adapter.card.version
            adapter.rows = await self._encode(adapter.answerer, version, ADAPTERS)
        else:
            await self._batcher.call(partial(_encode_classes, adapter.method), ADAPTERS, 1.0)
        adapter.prepared = True

    async def build(self, function: Callable[..., Any], *values: Any) -> Any:
        """Call a function that takes a moment for a long list, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._builders, function, *values)

    async def _encode(
        self, answerer: Answerer, version: tuple[str, str], caller: str, trained: ClassRows | None = None
    ) -> ClassRows:
        """Rows of all classes of an answerer; those of `trained` are known."""
        method, known = answerer.method, frozenset(trained.classes if trained else ())
        missing = [name for name in method.classes if name not in known]
        size = self.pace.pieces(LARGEST_SLICE)
        slices = [missing[start : start + size] for start in range(0, len(missing), size)]
        parts: list[ClassRows] = await asyncio.gather(
            *(self._batcher.call(partial(self._rows, method, names, version, caller), caller,
                         1.0 if caller == ADAPTERS else TEXT_COST * len(names))
              for names in slices)
        )  # fmt: skip
        rows: ClassRows = await self.build(
            _join_rows, [*parts, *([trained] if trained else [])], method.classes
        )
        method.set_class_rows(rows)
        return rows

    @torch.no_grad()
    def _rows(self, method: Method, names: Sequence[str], version: tuple[str, str], caller: str) -> ClassRows:
        """Rows of some classes; those that are cached are not computed."""
        rows = [row for name in names if (row := self.rows.find((version, name))) is not None]
        cached = {row.classes[0] for row in rows}
        missing = tuple(name for name in names if name not in cached)
        if missing:
            part = method if missing == method.classes else method.with_classes(missing)
            new = self.pace.measure(len(missing), partial(_encode_classes, part))
            for name in () if caller == ADAPTERS else missing:  # an adapter has its own rows
                row = new.select((name,))
                self.rows.put((version, name), caller, row, _ROW_BYTES + row.bytes)
            rows.append(new)
        return ClassRows.join(rows)

    def close(self) -> None:
        """End the thread."""
        self._builders.shutdown(wait=False, cancel_futures=True)


def _join_rows(parts: Sequence[ClassRows], classes: Sequence[str]) -> ClassRows:
    """The rows of some classes, in their order."""
    return ClassRows.join(parts).select(classes)


@torch.no_grad()
def _encode_classes(method: Method) -> ClassRows:
    return method.encode_classes()
