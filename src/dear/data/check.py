"""Checks a user's own dataset: images that cannot be read, and how evenly classes are filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dear._io.image_file import threaded
from dear.data.images import ImageSet
from dear.data.names import natural_key
from dear.errors import DataError, InputError, UsageError

_SHOWN = 20


@dataclass(frozen=True)
class Unreadable:
    """An image that cannot be read, and why."""

    key: str
    reason: str
    place: int  #: in the set


@dataclass(frozen=True)
class ImageReport:
    """What a pass over all images found.

    Attributes:
        checked: how many images were decoded.
        unreadable: those that could not be.
        kept: the set without them.
    """

    checked: int
    unreadable: tuple[Unreadable, ...]
    kept: ImageSet

    def __str__(self) -> str:
        if not self.unreadable:
            return f"all {self.checked} images can be read"
        lines = [f"{len(self.unreadable)} of {self.checked} images cannot be read:"]
        lines += [f"  {image.reason}" for image in self.unreadable[:_SHOWN]]
        if len(self.unreadable) > _SHOWN:
            lines.append(f"  and {len(self.unreadable) - _SHOWN} more")
        return "\n".join(lines)


def class_counts(images: ImageSet) -> dict[str, int]:
    """Images of each class, fewest first, classes without any included."""
    counts = torch.bincount(images.labels, minlength=len(images.classes)).tolist()
    named = zip(images.classes, counts, strict=True)
    return dict(sorted(named, key=lambda item: (item[1], natural_key(item[0]))))


def describe_balance(counts: dict[str, int], shown: int = 5) -> str:
    """How evenly images are spread over classes, in one sentence.

    >>> describe_balance({"cat": 4, "dog": 4})
    '8 images of 2 classes, 4 per class'
    >>> describe_balance({"cat": 0, "dog": 2, "emu": 40})
    '42 images of 3 classes, from 0 to 40 per class; fewest: cat 0, dog 2, emu 40'
    """
    values = list(counts.values())
    start = f"{sum(values)} images of {len(values)} classes, "
    if not values or values[0] == values[-1]:
        return f"{start}{values[0] if values else 0} per class"
    fewest = ", ".join(f"{name} {count}" for name, count in list(counts.items())[:shown])
    return f"{start}from {values[0]} to {values[-1]} per class; fewest: {fewest}"


def check_images(images: ImageSet, policy: str = "stop") -> ImageReport:
    """Decode every image of a set once, by several threads.

    Args:
        images: the set.
        policy: "stop" raises if any image cannot be read; "skip" leaves those out of `kept`.

    Raises:
        DataError: under "stop", listing all of them; under "skip", if no image is left.
        UsageError: an unknown policy.
    """
    if policy not in ("stop", "skip"):
        raise UsageError(f"unreadable images: the policy is stop or skip, not {policy!r}")
    bad = find_unreadable(images, range(len(images)))
    places = {image.place for image in bad}
    good = [index for index in range(len(images)) if index not in places]
    report = ImageReport(len(images), bad, images.subset(good) if bad else images)
    if bad and policy == "stop":
        raise DataError(f"{images.name}: {report}\nrepair or remove them, or skip them", hint="unreadable")
    if bad and not good:
        raise DataError(
            f"{images.name}: none of its {len(images)} images can be read; the first: {bad[0].reason}"
        )
    return report


def find_unreadable(images: ImageSet, places: Sequence[int]) -> tuple[Unreadable, ...]:
    """Those of some images of a set that cannot be decoded, found by several threads."""

    def problem(index: int) -> Unreadable | None:
        try:
            images.image(index)
        except InputError as error:
            return Unreadable(images.key(index), str(error), index)
        return None

    return tuple(found for found in threaded(problem, list(places)) if found is not None)
