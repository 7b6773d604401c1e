"""Images that are nearly the same and should not be: in training and test, or in two classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dear.data.duplicates import Prints, matching_pairs
from dear.shortcuts.properties import Floats
from dear.utils.progress import Progress, silent

COSINE = 0.97  #: of centered features from which on two images count as nearly the same
_ROWS = 256


@dataclass(frozen=True)
class Duplicate:
    """Two images that are nearly the same; `second` counts in the other set where two sets were compared."""

    first: int
    second: int
    #: "copy" (hashes and pixels agree, perhaps mirrored) or "alike" (features agree: cropped, the same scene)
    kind: str
    difference: float  #: root mean square difference of the small copies, in gray levels


def near_duplicates(
    prints: Prints,
    other: Prints | None = None,
    features: tuple[Floats, Floats] | None = None,
    labels: Sequence[int] | None = None,
    progress: Progress = silent,
) -> list[Duplicate]:
    """Pairs of nearly the same images, copies first: between two sets, or within the first.

    `features` [n, E] of both sets find what hashes do not. Within one set of images with `labels`, only pairs
    of different classes are listed.
    """
    pairs: dict[tuple[int, int], Duplicate] = {}
    for rows, columns, apart in matching_pairs(prints, other, progress):
        for first, second, difference in zip(rows.tolist(), columns.tolist(), apart.tolist(), strict=True):
            pairs[first, second] = Duplicate(first, second, "copy", difference)
    if features is not None:
        second_small = (prints if other is None else other).small
        for first, second in _alike(*features, within=other is None):
            step = prints.small[first].astype(np.float64) - second_small[second]
            pair = Duplicate(first, second, "alike", float(np.sqrt((step**2).mean())))
            pairs.setdefault((first, second), pair)
    listed = [one for one in pairs.values() if labels is None or labels[one.first] != labels[one.second]]
    return sorted(listed, key=lambda one: (one.kind != "copy", one.difference, one.first, one.second))


def _alike(first: Floats, second: Floats, within: bool) -> Iterator[tuple[int, int]]:
    """Pairs of places whose centered features [n, E] and [m, E] nearly agree; `within` one set each once."""
    unit_first, others = _unit(first), _unit(second)
    for start in range(0, len(unit_first), _ROWS):
        rows, columns = np.nonzero(unit_first[start : start + _ROWS] @ others.T >= COSINE)
        for row, column in zip((rows + start).tolist(), columns.tolist(), strict=True):
            if not within or row < column:
                yield row, column


def _unit(features: Floats) -> Floats:
    centered = features - features.mean(axis=0)
    unit: Floats = centered / np.maximum(np.linalg.norm(centered, axis=1, keepdims=True), 1e-12)
    return unit
