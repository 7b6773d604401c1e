"""Stored galleries: images to search, computed once through the queue for every way to search them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import DearError
from dear.heads.concept_words import find_attribute
from dear.heads.focus import attribute_heads
from dear.heads.known_roles import known_roles
from dear.heads.neighbors import HeadIndex
from dear.heads.roles import RoleMap
from dear.images.views import Size
from dear.methods.dear import DeAR
from dear.serve.engine import ImageJob
from dear.serve.errors import Refused
from dear.serve.store import Adapter

WAYS = ("features", "heads")
_CHUNK = 32  # gallery images that wait in the queue at once, so that requests pass between them
_MOST_CACHED = 32  # galleries times ways to search them that are cached
Compute = Callable[[Sequence[ImageJob]], Awaitable[list[Tensor]]]
Near = Callable[[str, Tensor], Tensor]  #: cosines [n] of a gallery with a query, in a space; -2: left out


@dataclass(frozen=True)
class Match:
    """An image of a gallery and its cosine with the query."""

    key: str
    similarity: float


class ByFeatures:
    """By an adapter's features per attribute (DeAR), else by the image feature of its backbone.

    `names` are those of the spaces. `key` says what is searched by, and its version: of two versions only the
    newer is cached.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.method = adapter, adapter.method
        self.names = self.method.attributes if isinstance(self.method, DeAR) else ("image",)
        self.key: tuple[Hashable, Hashable] = (("features", adapter.card.name), adapter.card.version)

    def space(self, attribute: str) -> str:
        """The space that is meant, in any case of its letters."""
        if not isinstance(self.method, DeAR):
            name = self.adapter.card.name
            raise Refused(400, f"the adapter {name!r} has no features per attribute; leave it out")
        try:
            return self.names[self.method.attribute_index(attribute)]
        except DearError as error:
            raise Refused(400, str(error)) from None

    def job(self, pixels: Tensor) -> ImageJob:
        """What is asked of an image, in the gallery or as a query: unit features [A, E]."""
        return ImageJob(pixels, self.adapter.answerer, spaces=True)

    def index(self, found: Tensor) -> Near:
        """Compares features [n, A, E] of a gallery with those of a query."""
        return lambda name, query: found[:, self.names.index(name)] @ query[self.names.index(name)]


class ByHeads:
    """By what the frozen backbone's heads of an attribute add; an image that is the query is left out."""

    def __init__(self, clip: Clip, roles: RoleMap) -> None:
        self.clip, self.roles = clip, roles
        spaces = attribute_heads(roles)
        self.names = tuple(spaces)
        self.key: tuple[Hashable, Hashable] = (("heads", tuple(spaces.items())), "")

    def space(self, attribute: str) -> str:
        """The space that is meant, in any case of its letters."""
        try:
            return find_attribute(attribute, self.names)
        except DearError as error:
            raise Refused(400, str(error)) from None

    def job(self, pixels: Tensor) -> ImageJob:
        """The image feature and the outputs of the heads behind it."""
        return ImageJob(pixels, None, layers=self.roles.layers)

    def index(self, found: Tensor) -> Near:
        """Compares feature and outputs [n, E + L · H · d] of a gallery with those of a query."""
        width, shape = self.clip.config.embed_dim, (len(self.roles.layers), self.roles.heads, -1)
        index = HeadIndex(self.clip, self.roles, found[:, :width], found[:, width:].unflatten(1, shape))
        return lambda name, query: index.similarities(name, query[:width], query[width:].unflatten(0, shape))


Search = ByFeatures | ByHeads


def search_by(adapter: Adapter, way: str, clip: Clip) -> Search:
    """The way to search that a request asks for."""
    if way not in WAYS:
        raise Refused(400, f"by must be {' or '.join(WAYS)}; got {way!r}")
    if way == "features":
        return ByFeatures(adapter)
    roles = adapter.method.roles or known_roles(clip)
    if roles is not None and roles.caveat():
        raise Refused(400, roles.caveat())
    if roles is None or not attribute_heads(roles):
        name = adapter.card.name
        raise Refused(400, f"neither {name!r} nor {clip.name} has a role map with heads of an attribute")
    return ByHeads(clip, roles)


class Galleries:
    """Galleries by name; `compute` answers jobs in the service's queue."""

    def __init__(self, images: Mapping[str, ImageSet], size: Size, compute: Compute) -> None:
        self._images, self._size, self._compute_jobs = dict(images), size, compute
        self._cached: OrderedDict[tuple[Hashable, ...], asyncio.Task[Near]] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the galleries."""
        return tuple(sorted(self._images))

    def named(self, name: str | None) -> str:
        """The gallery that is meant; None means the only one."""
        if not self._images:
            raise Refused(404, "this service stores no gallery")
        if name is None and len(self._images) == 1:
            return next(iter(self._images))
        if name is None:
            raise Refused(400, f"name the gallery: {', '.join(self.names)}")
        if name not in self._images:
            raise Refused(404, f"no gallery is called {name!r}; there are {', '.join(self.names)}")
        return name

    async def index(self, gallery: str, search: Search) -> Near:
        """What compares a gallery with a query; computed the first time it is asked for.

        Whoever gives up waiting does not stop the computation: the next request finds more of it done.
        """
        key = (gallery, *search.key)
        task = self._cached.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            for old in [k for k in self._cached if k[:2] == key[:2]]:  # of an exchanged adapter
                self._cached.pop(old).cancel()
            task = self._cached[key] = asyncio.create_task(self._compute(gallery, search))
            while len(self._cached) > _MOST_CACHED:
                self._cached.popitem(last=False)[1].cancel()
        self._cached.move_to_end(key)
        return await asyncio.shield(task)

    async def _compute(self, gallery: str, search: Search) -> Near:
        images, loop, parts = self._images[gallery], asyncio.get_running_loop(), []
        for start in range(0, len(images), _CHUNK):
            rows = list(range(start, min(start + _CHUNK, len(images))))
            pixels = await loop.run_in_executor(None, images.pixels, rows, self._size)
            parts += await self._answers([search.job(one) for one in pixels])
        return await loop.run_in_executor(None, search.index, torch.stack(parts))

    async def _answers(self, jobs: Sequence[ImageJob]) -> list[Tensor]:
        while True:
            try:
                return await self._compute_jobs(jobs)
            except Refused as error:
                if error.http_status != 429:
                    raise
                await asyncio.sleep(0.1)  # requests come first

    def best(self, gallery: str, near: Tensor, top: int) -> list[Match]:
        """The images most like a query by cosines [n], most alike first."""
        images = self._images[gallery]
        ranked = near.topk(min(top, int((near > -2).sum())))
        pairs = zip(ranked.indices.tolist(), ranked.values.tolist(), strict=True)
        return [Match(images.key(place), value) for place, value in pairs]

    def close(self) -> None:
        """Stop what is being computed."""
        for task in self._cached.values():
            if not task.done():
                task.get_loop().call_soon_threadsafe(task.cancel)
