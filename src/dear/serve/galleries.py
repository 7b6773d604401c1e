"""Stored galleries: images to search, with their features per adapter computed once through the queue."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from dear._io.image_file import Size
from dear.data.images import ImageSet
from dear.methods.base import Method
from dear.methods.dear import DeAR
from dear.serve.engine import ImageJob
from dear.serve.errors import Refused
from dear.serve.store import Adapter

_CHUNK = 32  # gallery images that wait in the queue at once, so that requests pass between them
_MOST_KEPT = 32  # galleries times adapters whose features are kept
Submit = Callable[[Sequence[ImageJob]], list[Future[Tensor]]]


@dataclass(frozen=True)
class Match:
    """An image of a gallery and its cosine with the query."""

    key: str
    similarity: float


def spaces(method: Method) -> tuple[str, ...]:
    """The feature spaces of a method: its attributes, or the frozen image feature alone."""
    return method.attributes if isinstance(method, DeAR) else ("image",)


class Galleries:
    """Galleries by name.

    Args:
        images: of each gallery.
        size: side of CLIP's view of an image.
        submit: puts jobs into the service's queue.
        features_at_once: adapters and galleries whose features are kept; the least recently used makes room.
    """

    def __init__(
        self, images: Mapping[str, ImageSet], size: Size, submit: Submit, features_at_once: int = _MOST_KEPT
    ) -> None:
        self._images, self._size, self._submit, self._most = dict(images), size, submit, features_at_once
        self._features: OrderedDict[tuple[str, str, str], asyncio.Task[Tensor]] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the galleries."""
        return tuple(sorted(self._images))

    def named(self, name: str | None) -> str:
        """The gallery that is meant; None means the only one.

        Raises:
            Refused: there is none of that name, or several and none is named.
        """
        if not self._images:
            raise Refused(404, "this service stores no gallery")
        if name is None and len(self._images) == 1:
            return next(iter(self._images))
        if name is None:
            raise Refused(400, f"name the gallery: {', '.join(self.names)}")
        if name not in self._images:
            raise Refused(404, f"no gallery is called {name!r}; there are {', '.join(self.names)}")
        return name

    async def features(self, gallery: str, adapter: Adapter) -> Tensor:
        """Unit features [n, A, E] of a gallery under an adapter; computed the first time they are asked for.

        Whoever gives up waiting does not stop the computation: the next request finds more of it done.
        """
        key = (gallery, adapter.card.name, adapter.card.version)
        task = self._features.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            for old in [k for k in self._features if k[:2] == key[:2]]:  # of an exchanged adapter
                self._features.pop(old).cancel()
            task = self._features[key] = asyncio.create_task(self._compute(gallery, adapter.method))
            while len(self._features) > self._most:
                self._features.popitem(last=False)[1].cancel()
        self._features.move_to_end(key)
        return await asyncio.shield(task)

    async def _compute(self, gallery: str, method: Method) -> Tensor:
        images, loop, parts = self._images[gallery], asyncio.get_running_loop(), []
        for start in range(0, len(images), _CHUNK):
            rows = list(range(start, min(start + _CHUNK, len(images))))
            pixels = await loop.run_in_executor(None, images.pixels, rows, self._size)
            parts += await self._answers([ImageJob(one, method, spaces=True) for one in pixels])
        return torch.stack(parts)

    async def _answers(self, jobs: Sequence[ImageJob]) -> list[Tensor]:
        while True:
            try:
                return list(await asyncio.gather(*map(asyncio.wrap_future, self._submit(jobs))))
            except Refused as error:
                if error.http_status != 429:
                    raise
                await asyncio.sleep(0.1)  # requests come first

    def best(self, gallery: str, features: Tensor, query: Tensor, top: int) -> list[list[Match]]:
        """The images most like a query [A, E] in each space, most alike first."""
        images, found = self._images[gallery], []
        for number in range(len(query)):
            ranked = (features[:, number] @ query[number]).topk(min(top, len(images)))
            pairs = zip(ranked.indices.tolist(), ranked.values.tolist(), strict=True)
            found.append([Match(images.key(place), value) for place, value in pairs])
        return found

    def close(self) -> None:
        """Stop what is being computed."""
        for task in self._features.values():
            if not task.done():
                task.get_loop().call_soon_threadsafe(task.cancel)
