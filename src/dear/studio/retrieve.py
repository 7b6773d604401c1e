"""The Retrieve tab: images that are similar to a query in one attribute."""

from __future__ import annotations

from PIL import Image
from torch import Tensor

from dear.data.images import ImageSet
from dear.errors import DataError
from dear.heads.focus import attribute_heads
from dear.methods.base import Method
from dear.methods.dear import DeAR
from dear.studio.state import StudioState, check_folder, name_of
from dear.tasks.retrieve import Match, gallery_features, gallery_of, rank, retrieve
from dear.utils.progress import Progress, silent

MOST = 20_000


def attributes(state: StudioState) -> list[str]:
    """Attributes to search by: those of DeAR, or those that have heads in an informative role map."""
    method = state.model.method
    if isinstance(method, DeAR):
        return list(method.attributes)
    roles = state.roles
    return [] if roles is None or roles.caveat() else list(attribute_heads(roles))


class ImageSearch:
    """Retrieval of the studio; the features of a gallery are computed once per DeAR model."""

    def __init__(self, state: StudioState) -> None:
        self.state = state
        self._cached: tuple[Method, str, ImageSet, Tensor] | None = None

    def gallery(self, folder: str) -> ImageSet:
        """The images to search: a folder of this computer, or without one the images of the studio."""
        name = folder.strip()
        if not name:
            return self.state.images
        images = gallery_of(check_folder(self.state, name))
        if len(images) > MOST:
            raise DataError(f"{name}: the studio searches up to {MOST:,} images, got {len(images):,}")
        return images

    def find(
        self,
        query: Image.Image,
        attribute: str,
        folder: str = "",
        top: int = 8,
        progress: Progress | None = None,
    ) -> list[tuple[Image.Image, str, float]]:
        """The nearest images of the gallery: (image, name, cosine), nearest first."""
        method, report = self.state.model.method, progress or silent

        def reading(stage: str, done: int, total: int | None) -> None:
            report("reading the gallery", done, total)

        nearest: Match
        if isinstance(method, DeAR):
            place = method.attribute_index(attribute)
            images, features = self._features(method, folder, reading)
            nearest = rank(method, query, features, images, top)[place]
        else:
            images = self.gallery(folder)
            nearest = retrieve(
                query=query,
                gallery=images,
                by="heads",
                backbone=self.state.clip,
                roles=self.state.roles,
                attribute=attribute,
                top=top,
                progress=reading,
            )[0]
        return [
            (images.image(index), name_of(images, index), cosine)
            for index, cosine in zip(nearest.indices, nearest.similarity, strict=True)
        ]

    def _features(self, method: DeAR, folder: str, progress: Progress) -> tuple[ImageSet, Tensor]:
        cached = self._cached
        if cached is not None and cached[0] is method and cached[1] == folder:
            return cached[2], cached[3]
        images = self.gallery(folder)
        features = gallery_features(method, images, progress)
        self._cached = (method, folder, images, features)
        return images, features
