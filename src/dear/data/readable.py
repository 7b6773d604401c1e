"""An image set in which files that cannot be read are skipped or all named, without a pass of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from dear._io.image_file import Size, side_of
from dear.data.check import ImageReport, find_unreadable
from dear.data.images import ImageSet
from dear.errors import DataError, InputError, UsageError


class Readable:
    """An image set whose damaged images are found while the others are used: each is decoded once.

    Under "stop" the first damaged image ends the work; the remaining images are then checked, so that the
    error names all of them. Under "skip" a damaged image is black; `problems` has its place and the reason.

    Args:
        images: the set.
        policy: "stop" or "skip".
    """

    def __init__(self, images: ImageSet, policy: str = "stop") -> None:
        if policy not in ("stop", "skip"):
            raise UsageError(f"unreadable images: the policy is stop or skip, not {policy!r}")
        self.images, self.policy = images, policy
        self.problems: dict[int, str] = {}  #: place of an image -> why it cannot be read
        self.name, self.classes, self.template = images.name, images.classes, images.template
        self.labels, self.domains = images.labels, images.domains

    def __len__(self) -> int:
        return len(self.images)

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """The evaluation view, uint8 [b, 3, size, size]."""
        try:
            return self.images.pixels(indices, size)
        except InputError:
            if self.policy == "stop":
                self._refuse(min(int(index) for index in indices))
                raise  # it can be read now
        return torch.stack([self._one(int(index), size) for index in indices])

    def _refuse(self, first: int) -> None:
        """Name all images from `first` on that cannot be read; those before it were read."""
        bad = find_unreadable(self.images, range(first, len(self.images)))
        if bad:
            report = ImageReport(len(self.images), bad, self.images)
            raise DataError(f"{self.name}: {report}\nrepair or remove them, or skip them", hint="unreadable")

    def _one(self, index: int, size: Size) -> Tensor:
        try:
            return self.images.pixels([index], size)[0]
        except InputError as error:
            self.problems[index] = str(error)
            return torch.zeros(3, side_of(size), side_of(size), dtype=torch.uint8)

    def readable(self) -> list[int]:
        """Places of the images that could be read, after all were asked for.

        Raises:
            DataError: there is none.
        """
        if len(self.problems) == len(self) > 0:
            raise DataError(
                f"{self.name}: none of its {len(self)} images can be read; the first: {self.problems[0]}"
            )
        return [index for index in range(len(self)) if index not in self.problems]

    def image(self, index: int) -> Image.Image:
        """A whole image, RGB."""
        return self.images.image(index)

    def key(self, index: int) -> str:
        """A name of the image that does not change when others come or go."""
        return self.images.key(index)

    def subset(self, indices: Sequence[int]) -> ImageSet:
        """The images at `indices`, in that order, with the same classes."""
        return self.images.subset(indices)

    def select_classes(self, names: Sequence[str]) -> ImageSet:
        """The images of some classes; labels count into `names`."""
        return self.images.select_classes(names)
