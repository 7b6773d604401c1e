"""Folds of a cross-validation: classes are spread evenly, copies of an image stay together.

scikit-learn's StratifiedGroupKFold does not fit few-shot sets: it refuses more folds than a class has images,
may put all units of a class into one fold, and its folds depend on the order of images and classes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

SAME = 1e-4  #: distance of unit features up to which two images count as copies
NEVER = -1  #: the fold of an image that is never held out

IntArray = NDArray[np.int64]


def assign_folds(
    labels: Sequence[int] | IntArray,
    folds: int,
    keys: Sequence[Any],
    units: Sequence[int] | IntArray | None = None,
) -> IntArray:
    """The fold of each of n images, [n]; `NEVER` for an image that is never held out.

    The images of a unit are in one fold. Each unit goes to the fold that holds the fewest images of its
    class, and of those to the smallest fold. Units are dealt in the order of their smallest key, so that the
    folds do not depend on the order of images or classes. A class with one unit is never held out: without it
    the class could not be trained.

    Args:
        labels: of the images, [n].
        folds: their number, at least 2.
        keys: one per image, values that can be sorted.
        units: one per image, the same for copies; None: there are no copies.

    >>> assign_folds([0, 0, 1, 1, 2], 2, keys="abcde").tolist()
    [0, 1, 0, 1, -1]
    >>> assign_folds([0, 0, 0, 0], 2, keys="abcd", units=[7, 8, 8, 9]).tolist()
    [0, 1, 1, 0]
    """
    classes = np.asarray(labels).tolist()
    unit_of = list(range(len(classes))) if units is None else np.asarray(units).tolist()
    members: dict[int, list[int]] = defaultdict(list)
    for index in sorted(range(len(classes)), key=lambda index: keys[index]):
        members[unit_of[index]].append(index)
    counts_by_class: dict[int, list[int]] = defaultdict(lambda: [0] * folds)  # images of a class per fold
    # class of a unit's first image -> units
    units_by_class: dict[int, list[int]] = defaultdict(list)
    units_of: dict[int, set[int]] = defaultdict(set)
    for unit, indices in members.items():
        units_by_class[classes[indices[0]]].append(unit)
        for index in indices:
            units_of[classes[index]].add(unit)
    assigned, sizes = np.full(len(classes), NEVER, dtype=np.int64), [0] * folds
    for units_of_class in units_by_class.values():
        for unit in units_of_class:
            indices = members[unit]
            if min(len(units_of[classes[index]]) for index in indices) < 2:
                continue
            counts = counts_by_class[classes[indices[0]]]
            fold = min(range(folds), key=lambda fold: (counts[fold], sizes[fold]))
            sizes[fold] += len(indices)
            for index in indices:
                assigned[index] = fold
                counts_by_class[classes[index]][fold] += 1
    images = Counter(classes)
    for label, counts in counts_by_class.items():  # units of several classes may have met in one fold
        if max(counts) == images[label]:
            assigned[[index for index, other in enumerate(classes) if other == label]] = NEVER
    return _exclude_partial_units(assigned, unit_of)


def _exclude_partial_units(assigned: IntArray, units: Sequence[int]) -> IntArray:
    """The folds, where a unit with an image that is never held out is never held out."""
    never = {unit for unit, fold in zip(units, assigned.tolist(), strict=True) if fold == NEVER}
    assigned[[unit in never for unit in units]] = NEVER
    return assigned


def feature_folds(
    features: Tensor, labels: Tensor, folds: int, units: IntArray | None = None, seed: int = 0
) -> Tensor:
    """`assign_folds` of images with features [n, E]; int64 [n] on the device of the labels.

    Images are ordered along a random direction. Without `units`, images with equal features are copies.
    """
    units = equal_rows(features) if units is None else units
    fold = assign_folds(labels.cpu().numpy(), folds, _along_direction(features, seed).tolist(), units)
    return torch.from_numpy(fold).to(labels.device)


def feature_order(features: Tensor) -> Tensor:
    """Places [n] in an order that depends on the features [n, E] of the images, not on the images' order."""
    return _along_direction(features, 0).argsort(stable=True)


def _along_direction(features: Tensor, seed: int) -> Tensor:
    """Cosines [n] of features [n, E] with a random direction, float64 on the CPU."""
    unit = F.normalize(features.detach().double().cpu(), dim=1)
    direction = torch.randn(unit.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return unit @ direction


def equal_rows(features: Tensor) -> IntArray:
    """The unit of each row [n] of features [n, E]; rows with the same direction have the same unit.

    >>> equal_rows(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])).tolist()
    [0, 1, 0]
    """
    unit = F.normalize(features.detach().double().cpu(), dim=1)
    order = feature_order(features)
    gaps = (unit[order[1:]] - unit[order[:-1]]).norm(dim=1)
    number = torch.cat([torch.zeros(min(1, len(unit)), dtype=torch.int64), (gaps > SAME).long().cumsum(0)])
    first: dict[int, int] = {}
    units = np.empty(len(unit), dtype=np.int64)
    units[order.numpy()] = number.numpy()
    return np.array(
        [first.setdefault(number_of_unit, index) for index, number_of_unit in enumerate(units.tolist())],
        dtype=np.int64,
    )
