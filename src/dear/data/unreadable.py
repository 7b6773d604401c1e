"""Images that cannot be read: found before a training, or while images are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.data.images import ImageSet, ImageSetWrapper
from dear.errors import DataError, InputError, UsageError
from dear.images.views import Size, side_of
from dear.utils.parallel import map_threads

_SHOWN = 20  # unreadable images that a message names


@dataclass(frozen=True)
class Unreadable:
    """An image that cannot be read, and why."""

    key: str
    reason: str
    index: int  #: in the set


@dataclass(frozen=True)
class ImageReport:
    """The result of decoding all images."""

    checked: int  #: number of images
    unreadable: tuple[Unreadable, ...]  #: images that cannot be decoded
    kept: ImageSet  #: the set without them

    def __str__(self) -> str:
        if not self.unreadable:
            return f"all {self.checked} images can be read"
        lines = [f"{len(self.unreadable)} of {self.checked} images cannot be read:"]
        lines += [f"  {image.reason}" for image in self.unreadable[:_SHOWN]]
        if len(self.unreadable) > _SHOWN:
            lines.append(f"  and {len(self.unreadable) - _SHOWN} more")
        return "\n".join(lines)


def check_images(images: ImageSet, policy: str = "stop") -> ImageReport:
    """Decode every image of a set once, by several threads.

    Args:
        images: the set.
        policy: "stop" raises if any image cannot be read; "skip" leaves those out of `kept`.
    """
    if policy not in ("stop", "skip"):
        raise UsageError(f"policy must be stop or skip, got {policy!r}")
    unreadable = find_unreadable(images, range(len(images)))
    indices = {image.index for image in unreadable}
    kept = [index for index in range(len(images)) if index not in indices]
    report = ImageReport(len(images), unreadable, images.subset(kept) if unreadable else images)
    if unreadable and policy == "stop":
        raise DataError(f"{images.name}: {report}\nrepair or remove them, or skip them", hint="unreadable")
    if unreadable and not kept:
        raise DataError(
            f"{images.name}: none of its {len(images)} images can be read; the first: {unreadable[0].reason}"
        )
    return report


def find_unreadable(images: ImageSet, indices: Sequence[int]) -> tuple[Unreadable, ...]:
    """The images at some indices that cannot be decoded; several threads search."""

    def problem(index: int) -> Unreadable | None:
        try:
            images.image(index)
        except InputError as error:
            return Unreadable(images.key(index), str(error), index)
        return None

    return tuple(image for image in map_threads(problem, list(indices)) if image is not None)


class CheckedImages(ImageSetWrapper):
    """An image set that finds damaged images while it is used: each image is decoded once.

    With the policy "stop" the first damaged image raises; the remaining images are then checked, so that the
    error names all damaged ones. With "skip" a damaged image is black; `problems` has its index and reason.

    Args:
        images: the set.
        policy: "stop" or "skip".
    """

    def __init__(self, images: ImageSet, policy: str = "stop") -> None:
        if policy not in ("stop", "skip"):
            raise UsageError(f"policy must be stop or skip, got {policy!r}")
        self.images, self.policy = images, policy
        self.problems: dict[int, str] = {}  #: index of an image -> why it cannot be read

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """The evaluation view, uint8 [b, 3, size, size]."""
        try:
            return self.images.pixels(indices, size)
        except InputError:
            if self.policy == "stop":
                self._refuse(min(int(index) for index in indices))
                raise  # it can be read now
        views = [self._view(int(index), size) for index in indices]
        device = next((view.device for view in views if view is not None), None)
        black = torch.zeros(3, side_of(size), side_of(size), dtype=torch.uint8, device=device)
        return torch.stack([black if view is None else view for view in views])

    def subset(self, indices: Sequence[int]) -> CheckedImages:
        """See `ImageSet`."""
        return CheckedImages(self.images.subset(indices), self.policy)

    def select_classes(self, names: Sequence[str]) -> CheckedImages:
        """See `ImageSet`."""
        return CheckedImages(self.images.select_classes(names), self.policy)

    def _refuse(self, first: int) -> None:
        """Raise a DataError that names all unreadable images from `first` on."""
        unreadable = find_unreadable(self.images, range(first, len(self.images)))
        if unreadable:
            report = ImageReport(len(self.images), unreadable, self.images)
            raise DataError(f"{self.name}: {report}\nrepair or remove them, or skip them", hint="unreadable")

    def _view(self, index: int, size: Size) -> Tensor | None:
        try:
            return self.images.pixels([index], size)[0]
        except InputError as error:
            self.problems[index] = str(error)
            return None
