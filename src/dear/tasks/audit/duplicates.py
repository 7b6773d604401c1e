"""Images that are nearly the same and should not be: in training and test, or in two classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dear.shortcuts.properties import Floats, Measured

BITS = 6  #: of 64 in which the hashes of copies may differ
PIXELS = 12.0  #: root mean square difference of copies at 32 x 32, in gray levels
COSINE = 0.97  #: of centered features from which on two images count as nearly the same
_ROWS = 1024
_SET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.int64)


@dataclass(frozen=True)
class Duplicate:
    """Two images that are nearly the same; `second` counts in the other set where two sets were compared."""

    first: int
    second: int
    #: "copy" (hashes and pixels agree) or "alike" (features agree: cropped, turned, the same scene)
    kind: str
    difference: float  #: root mean square difference of the small copies, in gray levels


def near_duplicates(
    measured: Measured,
    other: Measured | None = None,
    features: tuple[Floats, Floats] | None = None,
    labels: Sequence[int] | None = None,
) -> list[Duplicate]:
    """Pairs of nearly the same images, copies first: between two sets, or within the first.

    `features` [n, E] of both sets find what hashes do not. Within one set of images with `labels`, only pairs
    of different classes are listed.
    """
    second = measured if other is None else other
    found: dict[tuple[int, int], Duplicate] = {}
    for start in range(0, len(measured), _ROWS):
        rows = np.arange(start, min(start + _ROWS, len(measured)))
        same = _bits(measured.hashes[rows][:, None] ^ second.hashes[None]) <= BITS
        alike = np.zeros_like(same)
        if features is not None:
            alike = _unit(features[0])[rows] @ _unit(features[1]).T >= COSINE
        for first, place in zip(*np.nonzero(same | alike), strict=True):
            pair = (int(rows[first]), int(place))
            if other is None and (
                pair[0] >= pair[1] or (labels is not None and labels[pair[0]] == labels[pair[1]])
            ):
                continue
            step = measured.small[pair[0]].astype(np.float64) - second.small[pair[1]]
            difference = float(np.sqrt((step**2).mean()))
            copy = bool(same[first, place]) and difference <= PIXELS
            if copy or alike[first, place]:
                found[pair] = Duplicate(*pair, "copy" if copy else "alike", difference)
    return sorted(found.values(), key=lambda one: (one.kind != "copy", one.difference))


def _bits(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """How many bits are set."""
    octets = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, 8)
    counted: NDArray[np.int64] = _SET[octets].sum(axis=-1)
    return counted


def _unit(features: Floats) -> Floats:
    centered = features - features.mean(axis=0)
    found: Floats = centered / np.maximum(np.linalg.norm(centered, axis=1, keepdims=True), 1e-12)
    return found
