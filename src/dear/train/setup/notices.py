"""Warnings before training: too few images, unequal classes, a backbone that cannot help."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from dear.clip.model import Clip
from dear.data.duplicates import MAX_IMAGES, Duplicates, count_shared_files
from dear.data.images import FileImages, ImageSet
from dear.data.open import HELD_OUT_SPLIT, open_data, split_of_path
from dear.errors import DataError
from dear.heads.concept_words import readable_words
from dear.train.setup.balance import counts

FEW = 5  #: images per class below which results depend much on which images they are
REAL_BACKBONE = "openai/clip-vit-base-patch16"  #: what to use for photos instead of `mini`
PHOTO_FALLOFF = 0.9  #: `spectral_falloff` of sets of photos is above, of images of the attribute world below
_WORLD = "world:"
_SIDE, _EXAMINED = 64, 32  # pixels per side of images of the world; images that are examined


def image_notices(images: ImageSet, balance: bool) -> list[str]:
    """Sentences on the number of images per class."""
    sizes = counts(images)
    fewest, most = min(sizes), max(sizes)
    notices = []
    if fewest < FEW:
        rare = images.classes[sizes.index(fewest)]
        notices.append(
            f"{sum(n < FEW for n in sizes)} of {len(sizes)} classes have fewer than {FEW} images "
            f"({rare!r} has {fewest}): accuracy will depend on which images these are; 16 or more per class "
            "are better"
        )
    if most >= 2 * fewest:
        consequence = (
            "images of rare classes are repeated" if balance else "large classes will be answered more often"
        )
        notices.append(f"the classes have between {fewest} and {most} images; {consequence}")
    return notices


def duplicate_notices(duplicates: Duplicates, images: ImageSet) -> list[str]:
    """A sentence where training images are copies of others, or where there are too many to search all."""
    sentence = duplicates.sentence(images.key)
    notices = [f"{sentence}; an image and its copies are held out together"] if sentence else []
    if not duplicates.searched:
        notices.append(
            f"{len(duplicates.units):,} images are more than {MAX_IMAGES:,}: only copies with equal content "
            "were searched, not re-saved, resized or mirrored ones"
        )
    return notices


def split_notices(data: str | None, root: str | None = None) -> list[str]:
    """Sentences where test images are copies of training images, or validation images are not used."""
    if data is None or not os.path.exists(data):  # a benchmark or a task of the world
        return []
    return [*_shared_notices(data, root), *_validation_notices(data, root)]


def _shared_notices(data: str, root: str | None) -> list[str]:
    try:
        training, test = (open_data(data, split, root=root) for split in ("train", HELD_OUT_SPLIT))
    except DataError:
        return []
    if not isinstance(training, FileImages) or not isinstance(test, FileImages):
        return []
    shared = count_shared_files(
        *([images.path(index) for index in range(len(images))] for images in (training, test))
    )
    if not shared:
        return []
    return [
        f"{shared} of {len(test)} test images are copies of training images, so test accuracy is too high; "
        "dear audit --data lists them"
    ]


def _validation_notices(data: str, root: str | None) -> list[str]:
    if split_of_path(data) is not None:
        return []
    try:
        test, val = (open_data(data, split, root=root) for split in (HELD_OUT_SPLIT, "val"))
    except DataError:
        return []
    if len(val) == len(test) and all(val.key(i) == test.key(i) for i in range(len(val))):
        return []  # without test images they are tested on
    return [
        f"the {len(val)} validation images are not used: probabilities are calibrated on held-out training "
        "images; to train on them too, move them to the training images"
    ]


def backbone_notices(clip: Clip, images: ImageSet) -> list[str]:
    """A sentence where a backbone of the attribute world meets unknown words or photographs."""
    if clip.text.rows is None or images.name.startswith(_WORLD):
        return []
    reasons = []
    unknown = unknown_classes(clip, images.classes)
    if unknown:
        reasons.append(f"has no words for {len(unknown)} of {len(images.classes)} classes ({unknown[0]!r})")
    if spectral_falloff(images) > PHOTO_FALLOFF:
        reasons.append("your images look like photographs")
    if not reasons:
        return []
    return [
        f"the backbone {clip.name!r} has seen only drawn images of the attribute world, "
        f"{' and '.join(reasons)}; for photos use a backbone trained on photos, such as {REAL_BACKBONE} or a "
        "folder with its weights"
    ]


def spectral_falloff(images: ImageSet) -> float:
    """How much weaker the finest details of images are than the next ones, at 64 x 64 pixels.

    Logarithm of the power at 20 to 24 cycles per side over that at 30 to 32, along rows or columns, the
    median of up to 32 images. A photograph that was made smaller has little left of the finest details;
    images of the world are drawn at that size.
    """
    rows = list(range(0, len(images), max(1, len(images) // _EXAMINED)))[:_EXAMINED]
    gray = images.pixels(rows, _SIDE).float().mean(dim=1)  # [n, 64, 64]
    power = torch.fft.fft2(gray - gray.mean(dim=(1, 2), keepdim=True)).abs().square()
    cycles = (torch.fft.fftfreq(_SIDE) * _SIDE).abs()
    largest = torch.maximum(cycles[:, None], cycles[None])  # of the two directions
    next_to, finest = (
        power[:, (largest >= low) & (largest < high)].mean(dim=1) for low, high in ((20, 24), (30, 33))
    )
    return float(((next_to + 1) / (finest + 1)).log().median())


def unknown_classes(clip: Clip, names: Sequence[str]) -> list[str]:
    """Class names with a word that a reduced vocabulary does not hold.

    >>> import dear
    >>> unknown_classes(dear.load("mini"), ["red circle", "lasagna"])
    ['lasagna']
    """
    readable = readable_words(clip, names)
    return [name for name in names if name not in readable]
