"""Stored galleries: images to search, computed once in the queue for every way to search them."""

from __future__ import annotations

import asyncio
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
from dear.serve.cache import Cache
from dear.serve.engine import ImageJob
from dear.serve.errors import Refused
from dear.serve.store import Adapter

WAYS = ("features", "heads")
_CHUNK = 32  # gallery images that wait in the queue at once, so that requests pass between them
_MOST_CACHED = 32  # galleries times ways to search them that are cached
Compute = Callable[[Sequence[ImageJob], str], Awaitable[list[Tensor]]]
Similarity = Callable[[str, Tensor], Tensor]  #: cosines [n] of a gallery with a query; -2: excluded


@dataclass(frozen=True)
class Match:
    """An image of a gallery and its cosine with the query."""

    key: str
    similarity: float


class ByFeatures:
    """By an adapter's features per attribute (DeAR), else by the image feature of its backbone.

    `names` are those of the spaces; `key` and `version` distinguish what is cached: of two versions of a key
    the last that was requested.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.method = adapter, adapter.method
        self.names = self.method.attributes if isinstance(self.method, DeAR) else ("image",)
        self.key: Hashable = ("features", adapter.card.name)
        self.version = adapter.card.version

    def space(self, attribute: str) -> str:
        """The name of a space, in any case of its letters."""
        if not isinstance(self.method, DeAR):
            name = self.adapter.card.name
            raise Refused(400, f"adapter {name!r} has no features per attribute; omit attribute")
        try:
            return self.names[self.method.attribute_index(attribute)]
        except DearError as error:
            raise Refused(400, str(error)) from None

    def job(self, pixels: Tensor) -> ImageJob:
        """The job of an image of the gallery or of a query: unit features [A, E]."""
        return ImageJob(pixels, self.adapter.answerer, spaces=True)

    def index(self, features: Tensor) -> Similarity:
        """Compares features [n, A, E] of a gallery with those of a query."""
        return lambda name, query: features[:, self.names.index(name)] @ query[self.names.index(name)]


class ByHeads:
    """By contributions of the frozen backbone's heads of an attribute; the query itself is excluded."""

    def __init__(self, clip: Clip, roles: RoleMap) -> None:
        self.clip, self.roles = clip, roles
        spaces = attribute_heads(roles)
        self.names = tuple(spaces)
        self.key: Hashable = ("heads", tuple(spaces.items()))
        self.version = ""

    def space(self, attribute: str) -> str:
        """The name of a space, in any case of its letters."""
        try:
            return find_attribute(attribute, self.names)
        except DearError as error:
            raise Refused(400, str(error)) from None

    def job(self, pixels: Tensor) -> ImageJob:
        """The image feature and the outputs of the heads behind it."""
        return ImageJob(pixels, None, layers=self.roles.layers)

    def index(self, features: Tensor) -> Similarity:
        """Compares feature and outputs [n, E + L · H · d] of a gallery with those of a query."""
        width, shape = self.clip.config.embed_dim, (len(self.roles.layers), self.roles.heads, -1)
        index = HeadIndex(self.clip, self.roles, features[:, :width], features[:, width:].unflatten(1, shape))
        return lambda name, query: index.similarities(name, query[:width], query[width:].unflatten(0, shape))


Search = ByFeatures | ByHeads


class _Index:
    """A gallery for one way to search it, as far as it is computed."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.features: list[Tensor] = []  #: of the first images, until all are there
        self.similarity: Similarity | None = None
        self.turns: dict[str, asyncio.Lock] = {}  #: by caller


def search_by(adapter: Adapter, way: str, clip: Clip) -> Search:
    """The way to search that a request names."""
    if way not in WAYS:
        raise Refused(400, f"by must be {' or '.join(WAYS)}, got {way[:100]!r}")
    if way == "features":
        return ByFeatures(adapter)
    roles = adapter.method.roles or known_roles(clip)
    if roles is not None and roles.caveat():
        raise Refused(400, roles.caveat())
    if roles is None or not attribute_heads(roles):
        name = adapter.card.name
        raise Refused(400, f"neither {name!r} nor its backbone has a role map with heads of an attribute")
    return ByHeads(clip, roles)


class Galleries:
    """Galleries by name; `compute` answers jobs of a caller in the service's queue."""

    def __init__(self, images: Mapping[str, ImageSet], size: Size, compute: Compute) -> None:
        self._images, self._size, self._compute_jobs = dict(images), size, compute
        self._indexes: Cache[_Index] = Cache(_MOST_CACHED)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the galleries."""
        return tuple(sorted(self._images))

    def resolve_name(self, name: str | None) -> str:
        """The name of a gallery; None is the only one."""
        if not self._images:
            raise Refused(
                404, "retrieve needs a gallery, and this service stores none; start it with --gallery"
            )
        if name is None and len(self._images) == 1:
            return next(iter(self._images))
        if name is None:
            raise Refused(400, f"gallery must be one of {', '.join(self.names)}, got none")
        if name not in self._images:
            raise Refused(404, f"gallery must be one of {', '.join(self.names)}, got {name[:100]!r}")
        return name

    async def index(self, gallery: str, search: Search, caller: str = "") -> Similarity:
        """The function that compares a gallery with a query, computed in the caller's turns at first.

        A request that gave up is continued by the next one.
        """
        key = (gallery, search.key)
        index = self._indexes.find(key)
        if index is None or index.version != search.version:
            index = _Index(search.version)
            self._indexes.put(key, caller, index)
        if index.similarity is not None:
            return index.similarity
        async with index.turns.setdefault(caller, asyncio.Lock()):
            if index.similarity is None:
                features, loop = index.features, asyncio.get_running_loop()
                await self._compute(gallery, search, caller, features)
                index.similarity = await loop.run_in_executor(None, search.index, torch.stack(features))
                index.features = []
            return index.similarity

    async def _compute(self, gallery: str, search: Search, caller: str, features: list[Tensor]) -> None:
        """Compute the features of a gallery that are missing."""
        images, loop = self._images[gallery], asyncio.get_running_loop()
        while (start := len(features)) < len(images):
            rows = list(range(start, min(start + _CHUNK, len(images))))
            pixels = await loop.run_in_executor(None, images.pixels, rows, self._size)
            chunk = await self._answers([search.job(one) for one in pixels], caller)
            if len(features) == start:  # else another caller was faster
                features += chunk

    async def _answers(self, jobs: Sequence[ImageJob], caller: str) -> list[Tensor]:
        while True:
            try:
                return await self._compute_jobs(jobs, caller)
            except Refused as error:
                if error.http_status != 429:
                    raise
                await asyncio.sleep(0.1)  # requests come first

    def best(self, gallery: str, similarity: Tensor, top: int) -> list[Match]:
        """The `top` images with the largest cosines [n] with a query, largest first."""
        images = self._images[gallery]
        ranked = similarity.topk(min(top, int((similarity > -2).sum())))
        pairs = zip(ranked.indices.tolist(), ranked.values.tolist(), strict=True)
        return [Match(images.key(index), value) for index, value in pairs]
