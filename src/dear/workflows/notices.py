"""Warnings before training: too few images, unequal classes, a backbone that cannot help."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.workflows.balance import counts

FEW = 5  #: images per class below which results depend much on which images they are
REAL_BACKBONE = "openai/clip-vit-base-patch16"  #: what to use for photos instead of `mini`
_WORLD = "world:"


def image_notices(images: ImageSet, balance: bool) -> list[str]:
    """Sentences on the number of images per class."""
    number = counts(images)
    fewest, most = min(number), max(number)
    found = []
    if fewest < FEW:
        rare = images.classes[number.index(fewest)]
        found.append(
            f"{sum(n < FEW for n in number)} of {len(number)} classes have fewer than {FEW} images "
            f"({rare!r} has {fewest}): accuracy will depend on which images these are; 16 or more per class "
            "are better"
        )
    if most >= 2 * fewest:
        how = (
            "images of rare classes are repeated" if balance else "large classes will be answered more often"
        )
        found.append(f"the classes have between {fewest} and {most} images; {how}")
    return found


def backbone_notices(clip: Clip, images: ImageSet) -> list[str]:
    """A sentence where a backbone of the attribute world meets anything else."""
    if clip.text.rows is None or images.name.startswith(_WORLD):
        return []
    unknown = unknown_classes(clip, images.classes)
    words = ""
    if unknown:
        words = f" and has no words for {len(unknown)} of {len(images.classes)} classes ({unknown[0]!r})"
    return [
        f"the backbone {clip.name!r} has seen only drawn images of the attribute world{words}; for photos "
        f"use a backbone trained on photos, such as {REAL_BACKBONE} or a folder with its weights"
    ]


def unknown_classes(clip: Clip, names: Sequence[str]) -> list[str]:
    """Class names with a word that a reduced vocabulary does not hold.

    >>> import dear
    >>> unknown_classes(dear.load("mini"), ["red circle", "lasagna"])
    ['lasagna']
    """
    rows = clip.text.rows
    if rows is None:
        return []
    shared = int(torch.bincount(rows).argmax())  # every id that training never used has this row
    unknown = []
    for name in names:
        ids = clip.tokenize([name])[0]
        words = ids[1 : int(ids.argmax())]  # between the beginning and the end of the text
        if bool((rows[words] == shared).any()):
            unknown.append(name)
    return unknown
