"""Image sets of edited copies, to train on together with the originals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

import torch
from PIL import Image
from torch import Tensor

from dear.data.content import stored_digest
from dear.data.images import BaseImageSet, ImageSet, ImageSetWrapper
from dear.images.views import Size, read_views
from dear.shortcuts.edits import random_edit, transfer
from dear.shortcuts.find import Shortcut


@dataclass(frozen=True, eq=False)
class EditedImages(ImageSetWrapper):
    """One edited copy of every image of a set: edited at random, or with the property of a class."""

    same_content: ClassVar[bool] = False
    images: ImageSet  #: the originals
    kind: str  #: kind of edit
    shortcut: Shortcut | None = None  #: its property is transferred to the copies; None: random edits
    donors: ImageSet | None = None  #: images of the class to transfer from; None: the originals
    seed: int = 1

    def image(self, index: int) -> Image.Image:
        """The edited copy; the same at every call."""
        rng = random.Random(f"{self.seed} {self.kind} {self.images.key(index)}")
        image = self.images.image(index)
        if self.shortcut is None:
            return random_edit(self.kind, image, rng)
        donors = self._donors
        members = (donors.labels == self.shortcut.label).nonzero()[:, 0].tolist()
        mask = None if self.shortcut.mark is None else self.shortcut.mark.mask
        return transfer(self.kind, image, donors.image(rng.choice(members)), mask, self.shortcut.name)

    @property
    def _donors(self) -> ImageSet:
        return self.images if self.donors is None else self.donors

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """CLIP's view of some copies, uint8 [b, 3, size, size]."""
        return read_views([self.image(int(index)) for index in indices], size)

    def key(self, index: int) -> str:
        """The original's key and the edit."""
        return f"{self.images.key(index)} ({self.kind} edited)"

    def subset(self, indices: Sequence[int]) -> EditedImages:
        """Copies of some of the originals."""
        return replace(self, images=self.images.subset(indices), donors=self._donors)

    def select_classes(self, names: Sequence[str]) -> EditedImages:
        """Copies of the images of some classes."""
        return replace(self, images=self.images.select_classes(names), donors=self._donors)


@dataclass(frozen=True, eq=False, repr=False)
class JoinedImages(BaseImageSet):
    """Images of several sets with the same classes; name and template are those of the first."""

    per_image: ClassVar[tuple[str, ...]] = ("sources",)
    name: str
    classes: tuple[str, ...]
    template: str
    labels: Tensor
    domains: tuple[str, ...] | None  #: None unless all sets have domains
    parts: tuple[ImageSet, ...]
    sources: tuple[tuple[int, int], ...]  #: (number of the part, index in it) of each image
    groups: None = None

    @classmethod
    def of(cls, *parts: ImageSet) -> JoinedImages:
        """All images of the sets, one set after the other."""
        first, domains = parts[0], [part.domains for part in parts]
        return cls(
            first.name,
            first.classes,
            first.template,
            torch.cat([part.labels for part in parts]),
            None if None in domains else tuple(chain.from_iterable(filter(None, domains))),
            parts,
            tuple((number, index) for number, part in enumerate(parts) for index in range(len(part))),
        )

    def image(self, index: int) -> Image.Image:
        """A whole image, RGB."""
        part, row = self.sources[int(index)]
        return self.parts[part].image(row)

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """CLIP's view of some images, uint8 [b, 3, size, size]."""
        views: dict[int, Tensor] = {}
        for number, part in enumerate(self.parts):
            rows = [row for row, index in enumerate(indices) if self.sources[int(index)][0] == number]
            if rows:
                pixels = part.pixels([self.sources[int(indices[row])][1] for row in rows], size)
                views |= dict(zip(rows, pixels, strict=True))
        return torch.stack([views[row] for row in range(len(indices))])

    def key(self, index: int) -> str:
        """The image's key in the set it comes from."""
        images, row = self.locate(index)
        return images.key(row)

    def digest(self, index: int) -> bytes | None:
        """Hash of the stored image; None for one that is in memory only, such as an edited copy."""
        return stored_digest(*self.locate(index))

    def locate(self, index: int) -> tuple[ImageSet, int]:
        """The set that an image comes from, and its index there."""
        part, row = self.sources[int(index)]
        return self.parts[part], row
