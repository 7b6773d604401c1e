"""Image sets of edited copies, to train on beside the originals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from PIL import Image
from torch import Tensor

from dear._io.image_file import Size, read_views
from dear.data.images import ImageSet, Wrapped
from dear.photos.edits import random_edit, transfer
from dear.photos.shortcuts import Shortcut


@dataclass(frozen=True, eq=False)
class EditedImages(Wrapped):
    """One copy of every image of a set, edited at random or given what the images of a class have."""

    same_content: ClassVar[bool] = False
    images: ImageSet  #: the originals
    #: of the edits
    kind: str
    #: copies get what the images of its class have; None: edits are random
    shortcut: Shortcut | None = None
    #: where images of that class come from; None: the originals
    donors: ImageSet | None = None
    seed: int = 1

    def image(self, index: int) -> Image.Image:
        """The edited copy; always the same one."""
        rng = random.Random(f"{self.seed} {self.kind} {self.images.key(index)}")
        image = self.images.image(index)
        if self.shortcut is None:
            return random_edit(self.kind, image, rng)
        donors = self.images if self.donors is None else self.donors
        members = (donors.labels == self.shortcut.label).nonzero()[:, 0].tolist()
        mask = None if self.shortcut.mark is None else self.shortcut.mark.mask
        donor = donors.image(rng.choice(members))
        return transfer(self.kind, image, donor, mask, self.shortcut.name)

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """CLIP's view of some copies, uint8 [b, 3, size, size]."""
        return read_views([self.image(int(index)) for index in indices], size)

    def key(self, index: int) -> str:
        """The original's key and the edit."""
        return f"{self.images.key(index)} ({self.kind} edited)"

    def subset(self, indices: Sequence[int]) -> EditedImages:
        """Copies of some of the originals."""
        donors = self.images if self.donors is None else self.donors
        return replace(self, images=self.images.subset(indices), donors=donors)

    def select_classes(self, names: Sequence[str]) -> EditedImages:
        """Copies of the images of some classes."""
        donors = self.images if self.donors is None else self.donors
        return replace(self, images=self.images.select_classes(names), donors=donors)


@dataclass(frozen=True, eq=False)
class JoinedImages:
    """Images of several sets with the same classes, in any order."""

    parts: tuple[ImageSet, ...]
    #: (number of the part, place in it) of each image
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, *parts: ImageSet) -> JoinedImages:
        """All images of the sets, one set after the other."""
        return cls(parts, tuple((n, place) for n, part in enumerate(parts) for place in range(len(part))))

    @property
    def name(self) -> str:
        """Name of the first set."""
        return self.parts[0].name

    @property
    def classes(self) -> tuple[str, ...]:
        """Those of the first set."""
        return self.parts[0].classes

    @property
    def template(self) -> str:
        """That of the first set."""
        return self.parts[0].template

    @property
    def labels(self) -> Tensor:
        """int64 [n]."""
        return torch.tensor([int(self.parts[part].labels[place]) for part, place in self.places])

    @property
    def domains(self) -> tuple[str, ...] | None:
        """The domain of each image, where all sets have domains."""
        known = [part.domains for part in self.parts]
        if any(domains is None for domains in known):
            return None
        return tuple((known[part] or ())[place] for part, place in self.places)

    def __len__(self) -> int:
        return len(self.places)

    def image(self, index: int) -> Image.Image:
        """A whole image, RGB."""
        part, place = self.places[int(index)]
        return self.parts[part].image(place)

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """CLIP's view of some images; each set reads its own."""
        views: dict[int, Tensor] = {}
        for number, part in enumerate(self.parts):
            own = [row for row, index in enumerate(indices) if self.places[int(index)][0] == number]
            if own:
                read = part.pixels([self.places[int(indices[row])][1] for row in own], size)
                views |= dict(zip(own, read, strict=True))
        return torch.stack([views[row] for row in range(len(indices))])

    def key(self, index: int) -> str:
        """The image's key in its own set."""
        part, place = self.places[int(index)]
        return self.parts[part].key(place)

    def subset(self, indices: Sequence[int]) -> JoinedImages:
        """The images at `indices`, in that order."""
        return replace(self, places=tuple(self.places[int(index)] for index in indices))

    def select_classes(self, names: Sequence[str]) -> JoinedImages:
        """The images of some classes; labels count into `names`."""
        return JoinedImages.of(*(part.select_classes(names) for part in self.parts))
