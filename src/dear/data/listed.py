"""An image set made of lists: files or Pillow images, and their labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image
from torch import Tensor

from dear._io.image_file import Size, open_image
from dear.data.images import find_classes, renumber, stack_views
from dear.data.names import TEMPLATE

ImageLike = str | os.PathLike[str] | Image.Image


@dataclass(frozen=True, eq=False)
class ListedImages:
    """An image set made of files (or Pillow images) and labels in lists.

    Attributes:
        items: files or Pillow images.
        labels: int64 [n].
        classes: names of the classes.
        template: prompt with `{}`.
        groups: a value beside the class, one per image, or None.
    """

    items: tuple[ImageLike, ...]
    labels: Tensor
    classes: tuple[str, ...]
    template: str = TEMPLATE
    name: str = "images"
    domains: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.items)

    def image(self, index: int) -> Image.Image:
        """A whole image, RGB, upright."""
        return open_image(self.items[index])

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """CLIP's view of some images, uint8 [b, 3, size, size]."""
        return stack_views([int(index) for index in indices], self.image, size)

    def key(self, index: int) -> str:
        """The file's path as given; the place in the list for an image in memory."""
        item = self.items[index]
        return f"item {index}" if isinstance(item, Image.Image) else Path(item).as_posix()

    def subset(self, indices: Sequence[int]) -> ListedImages:
        """The images at `indices`, with the same classes."""
        chosen = [int(i) for i in indices]
        return replace(
            self,
            items=tuple(self.items[i] for i in chosen),
            labels=self.labels[chosen],
            domains=None if self.domains is None else tuple(self.domains[i] for i in chosen),
            groups=None if self.groups is None else tuple(self.groups[i] for i in chosen),
        )

    def select_classes(self, names: Sequence[str]) -> ListedImages:
        """The images of some classes; labels count into `names`."""
        chosen, labels = renumber(self.labels, find_classes(self, names))
        return replace(self.subset(chosen.tolist()), labels=labels, classes=tuple(names))
