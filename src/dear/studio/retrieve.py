"""The Retrieve tab: images that are similar to the query in one attribute."""

from __future__ import annotations

from PIL import Image
from torch import Tensor

from dear.data.images import ImageSet
from dear.errors import DataError, UsageError
from dear.methods.base import Method
from dear.methods.dear import DeAR
from dear.studio.state import StudioState, check_folder, name_of
from dear.tasks.retrieve import gallery_features, gallery_of, rank
from dear.utils.progress import Progress

MOST = 20_000


class ImageSearch:
    """Retrieval of the studio; a gallery's features are computed once for a model."""

    def __init__(self, state: StudioState) -> None:
        self.state = state
        self._cached: tuple[Method, str, ImageSet, Tensor] | None = None

    def gallery(self, folder: str) -> ImageSet:
        """The images to search: a folder of this computer, or without one the images of the studio."""
        name = folder.strip()
        if not name:
            return self.state.images
        found = gallery_of(check_folder(self.state, name))
        if len(found) > MOST:
            raise DataError(f"{name}: holds {len(found):,} images; the studio searches up to {MOST:,}")
        return found

    def find(
        self,
        query: Image.Image,
        attribute: str,
        folder: str = "",
        top: int = 8,
        progress: Progress | None = None,
    ) -> list[tuple[Image.Image, str, float]]:
        """The nearest images of the gallery: (image, name, cosine), nearest first."""
        model = self.state.find_model(progress).method
        if not isinstance(model, DeAR):
            raise UsageError(f"{model.title} has no features of its own for attributes; load or train a DeAR")
        wanted = model.attributes[model.attribute_index(attribute)]
        images, features = self._features(model, folder, progress)
        found = next(one for one in rank(model, query, features, images, top) if one.attribute == wanted)
        return [
            (images.image(index), name_of(images, index), cosine)
            for index, cosine in zip(found.indices, found.similarity, strict=True)
        ]

    def _features(self, model: DeAR, folder: str, progress: Progress | None) -> tuple[ImageSet, Tensor]:
        cached = self._cached
        if cached is not None and cached[0] is model and cached[1] == folder:
            return cached[2], cached[3]
        images = self.gallery(folder)

        def reading(stage: str, done: int, total: int | None) -> None:
            if progress is not None:
                progress("reading the gallery", done, total)

        features = gallery_features(model, images, reading)
        self._cached = (model, folder, images, features)
        return images, features
