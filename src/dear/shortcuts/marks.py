"""Marks that many images of a class have at the same place: logos, frames, black corners, plain backgrounds.

On copies of 32 x 32 pixels. *Fixed mark*: where the images of the class vary far less than the others. *Mark
on a part of the class*: a patch that several images have in common although they differ everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dear.data.duplicates import SIDE as MARK
from dear.shortcuts.properties import Floats

MIN_PIXELS = 16  #: pixels of 32 x 32 that a fixed mark has at least
MAX_RELATIVE_VARIANCE = 0.1  #: pixels whose variance is below this share of the others' belong to the mark
PATCH, STRIDE = 4, 2  #: of the patches that images may have in common
#: root mean square of gray levels: below the first, patches are the same; above the second, images are not
SAME_PATCH, DIFFERENT_IMAGES = 12.0, 24.0
MIN_STRUCTURE = 24.0  #: standard deviation within a patch: below it is plain
MIN_SHARE = 0.3  #: of the class's images that have the patch in common
MAX_OTHER_SHARE = 0.02  #: of the other images may have such a patch

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Mark:
    """A mark of one class."""

    score: float  #: 0 to 1; for a fixed mark one minus the relative variance, for others (1 + share) / 2
    mask: Mask  #: bool [32, 32], where it is
    look: NDArray[np.uint8]  #: uint8 [32, 32, 3], what it looks like; only pixels of the mask count
    share: float = 1.0  #: share of the class's images that have it

    @property
    def place(self) -> str:
        """In words: "corners", "frame", "background", "bottom right" and so on."""
        return place_of(self.mask)

    @property
    def color(self) -> str:
        """In words, where the mark has one color: "black", "white", "blue", …; else "mixed"."""
        pixels = self.look[self.mask].astype(np.float64)
        return color_name(pixels.mean(axis=0)) if pixels.std(axis=0).max() < 40 else "mixed"


def fixed_marks(small: NDArray[np.uint8], labels: NDArray[np.int64], classes: int) -> list[Mark | None]:
    """For each class, the mark that all of its images have (with a low score if there is none).

    None for classes without images. Sums over all images are computed once; those of a class are subtracted.
    """
    all_images = _Moments.of(small)
    marks: list[Mark | None] = []
    for label in range(classes):
        members = small[labels == label]
        marks.append(_fixed_mark(members, all_images) if 0 < len(members) < len(small) else None)
    return marks


@dataclass(frozen=True, eq=False)
class _Moments:
    """Sums over images, from which variances of any part of them follow."""

    count: int
    total: Floats  # [32, 32, 3]
    squares: Floats  # [32, 32, 3]
    within: float  # sum over images of the variance within each

    @classmethod
    def of(cls, small: NDArray[np.uint8]) -> _Moments:
        total, squares, within = np.zeros((MARK, MARK, 3)), np.zeros((MARK, MARK, 3)), 0.0
        for start in range(0, len(small), 256):
            pixels = small[start : start + 256].astype(np.float64)
            total += pixels.sum(axis=0)
            squares += (pixels**2).sum(axis=0)
            within += float(pixels.var(axis=(1, 2)).sum())
        return cls(len(small), total, squares, within)

    def without(self, part: _Moments) -> _Moments:
        names = ("count", "total", "squares", "within")
        return _Moments(*(getattr(self, name) - getattr(part, name) for name in names))

    @property
    def variance(self) -> Floats:
        """Over the images, per pixel [32, 32]."""
        variance: Floats = (self.squares / self.count - (self.total / self.count) ** 2).sum(axis=-1)
        return variance


def _fixed_mark(in_class: NDArray[np.uint8], all_images: _Moments) -> Mark:
    """Where the variance of the class's images over that of the others is smallest.

    Images low in contrast (dark ones, say) vary less everywhere and have no mark: below half of the others'
    variance within images, the ratio is relative to that.
    """
    inside = _Moments.of(in_class)
    outside = all_images.without(inside)
    contrast = 2 * (inside.within / inside.count) / (outside.within / outside.count + 1.0)
    ratio = inside.variance / (outside.variance + 1.0) / min(1.0, max(contrast, 1e-3))
    lowest = np.sort(ratio, axis=None)[:MIN_PIXELS]
    mask = ratio <= max(float(lowest[-1]), MAX_RELATIVE_VARIANCE)
    look = np.median(in_class, axis=0).astype(np.uint8)
    return Mark(float(np.clip(1 - lowest.mean(), 0, 1)), mask, look)


def common_patch(small: NDArray[np.uint8], in_class: Mask) -> Mark | None:
    """A mark that only some images of the class have; None: there is none."""
    rng = np.random.default_rng(1)
    inside, outside = (
        rng.choice(rows, min(len(rows), limit), replace=False)
        for rows, limit in ((np.flatnonzero(in_class), 80), (np.flatnonzero(~in_class), 400))
    )
    rows = small[inside].astype(np.float32)  # [n, 32, 32, 3]
    patches = _patches(rows)  # [W, n, 48]
    # [W, n, 48] -> [W, n, 16, 3] -> [W, n]
    varied = patches.reshape(*patches.shape[:2], PATCH * PATCH, 3).std(axis=2).max(axis=2) >= MIN_STRUCTURE
    alike = (_distances(patches) < SAME_PATCH) & (
        _distances(rows.reshape(1, len(rows), -1)) > DIFFERENT_IMAGES
    )
    alike &= varied[:, :, None] & varied[:, None, :]
    counts = alike.sum(axis=2)  # [W, n], number of other images with the patch of image n
    window, center = np.unravel_index(int(counts.argmax()), counts.shape)
    share = (1 + int(counts[window, center])) / len(inside)
    if share < max(MIN_SHARE, 4 / len(inside)):
        return None
    top, left = (STRIDE * int(part) for part in divmod(int(window), (MARK - PATCH) // STRIDE + 1))
    difference = small[outside, top : top + PATCH, left : left + PATCH].astype(np.float32)
    difference -= rows[center, top : top + PATCH, left : left + PATCH]
    if float((np.sqrt((difference**2).mean(axis=(1, 2, 3))) < SAME_PATCH).mean()) > MAX_OTHER_SHARE:
        return None
    chosen = rows[[center, *np.flatnonzero(alike[window, center])]]
    still = chosen.var(axis=0).mean(axis=-1) < SAME_PATCH**2
    around = np.s_[max(0, top - 4) : top + 8, max(0, left - 4) : left + 8]
    mask = np.zeros((MARK, MARK), dtype=bool)
    mask[around] = still[around]
    return Mark((1 + share) / 2, mask, np.median(chosen, axis=0).astype(np.uint8), share)


def _patches(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """All patches of images [n, 32, 32, 3], [W, n, PATCH * PATCH * 3]."""
    starts = range(0, MARK - PATCH + 1, STRIDE)
    cut = [rows[:, top : top + PATCH, left : left + PATCH] for top in starts for left in starts]
    # [W, n, PATCH, PATCH, 3] -> [W, n, PATCH * PATCH * 3]
    return np.stack(cut).reshape(len(cut), len(rows), -1)


def _distances(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Root mean square difference of every pair of rows, [..., n, d] to [..., n, n]."""
    squares = (rows**2).mean(axis=-1)
    product = rows @ rows.swapaxes(-1, -2) / rows.shape[-1]
    squared: NDArray[np.float32] = squares[..., :, None] + squares[..., None, :] - 2 * product
    return np.sqrt(np.clip(squared, 0, None))


def place_of(mask: Mask) -> str:
    """Position of a mask [32, 32] in words."""
    if not mask.any():
        return "nowhere"
    ring = np.ones_like(mask)
    ring[3:-3, 3:-3] = False
    third = MARK // 4
    corners = {
        "top left": mask[:third, :third],
        "top right": mask[:third, -third:],
        "bottom left": mask[-third:, :third],
        "bottom right": mask[-third:, -third:],
    }
    total = mask.sum()
    marked = [name for name, part in corners.items() if part.sum() >= 0.1 * total]
    if sum(part.sum() for part in corners.values()) >= 0.6 * total:
        if len(marked) == 1:
            return marked[0]
        return f"corners ({', '.join(marked)})" if len(marked) < 4 else "corners"
    sides = [mask[0].mean(), mask[-1].mean(), mask[:, 0].mean(), mask[:, -1].mean()]
    if mask[ring].sum() >= 0.7 * total and sum(side > 0.3 for side in sides) >= 2:
        return "frame"
    spread = np.argwhere(mask).max(axis=0) - np.argwhere(mask).min(axis=0)
    if mask.mean() > 0.35 or (mask.mean() > 0.05 and spread.min() > MARK / 2):
        return "background"
    row, column = (np.argwhere(mask).mean(axis=0) / (MARK / 3)).astype(int).clip(0, 2)
    names = (("top", "middle", "bottom")[row], ("left", "center", "right")[column])
    return "center" if names == ("middle", "center") else " ".join(names)


def color_name(color: Floats) -> str:
    """A plain word for a color (red, green, blue from 0 to 255).

    >>> [color_name(np.array(color)) for color in ((0, 0, 0), (250, 250, 250), (20, 30, 220))]
    ['black', 'white', 'blue']
    """
    red, green, blue = (float(part) for part in color)
    light, spread = (red + green + blue) / 3, max(red, green, blue) - min(red, green, blue)
    if spread < 40:
        return "black" if light < 50 else "white" if light > 215 else "gray"
    names = {
        "red": (220, 30, 30), "green": (30, 160, 50), "blue": (30, 60, 220), "yellow": (230, 220, 40),
        "cyan": (40, 200, 220), "magenta": (220, 40, 200), "orange": (240, 140, 30), "brown": (120, 70, 30),
    }  # fmt: skip
    return min(names, key=lambda name: sum((a - b) ** 2 for a, b in zip(names[name], color, strict=True)))
