"""Few and unbalanced images: rare classes are repeated, small sets are trained for more epochs."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from dear.data.images import ImageSet, targets_of
from dear.runs.recipe import Recipe

LEAST_STEPS = 200  #: training steps, however small the set
MOST_REPEATS = 16  #: most repeats of an image of a rare class
_UNBALANCED = 2.0  # largest class over smallest class


def counts(images: ImageSet) -> list[int]:
    """Images per class."""
    targets = targets_of(images)
    if targets is not None:
        return [int(n) for n in targets.sum(dim=0)]
    return [int(n) for n in torch.bincount(images.labels, minlength=len(images.classes))]


def balanced_rows(labels: Tensor) -> list[int]:
    """Indices of images, those of rare classes repeated, so that an epoch shows classes about equally often.

    Every image occurs once if the largest class has less than twice the images of the smallest.
    """
    images_per_class = [n for n in torch.bincount(labels).tolist() if n]
    if max(images_per_class) < _UNBALANCED * min(images_per_class):
        return list(range(len(labels)))
    target_counts = [min(max(images_per_class), MOST_REPEATS * n) for n in images_per_class]
    members: dict[int, list[int]] = {label: [] for label in labels.unique().tolist()}
    for index, label in enumerate(labels.tolist()):
        members[label].append(index)
    return [
        group[repeat % len(group)]
        for group, total in zip(members.values(), target_counts, strict=True)
        for repeat in range(total)
    ]


def enough_steps(recipe: Recipe, images: int) -> Recipe:
    """The recipe with more epochs if it has fewer than `LEAST_STEPS` steps.

    >>> enough_steps(Recipe(epochs=10, batch=16), images=30).epochs
    100
    >>> enough_steps(Recipe(epochs=10, batch=16), images=1000).epochs
    10
    """
    per_epoch = math.ceil(images / recipe.batch)
    if recipe.epochs * per_epoch >= LEAST_STEPS:
        return recipe
    return replace(recipe, epochs=math.ceil(LEAST_STEPS / per_epoch))
