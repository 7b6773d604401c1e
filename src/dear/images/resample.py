"""Resizing of 8-bit images: antialiased filters in whole numbers, with one answer everywhere.

PyTorch's kernel (weights of 16 bits, first across, then down) does the work where PyTorch is loaded; an
exported model runs without it and gets the same bytes from NumPy. Pillow's differ by at most 1 of 255.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels: TypeAlias = NDArray[np.uint8]  #: [height, width, 3]
_BLOCK = 16  # results per matrix product


def resample(image: Pixels, width: int, height: int, bilinear: bool = False) -> Pixels:
    """The image in another size, bicubic unless `bilinear`.

    >>> resample(np.full((5, 7, 3), 9, np.uint8), 3, 4)[0, 0].tolist()
    [9, 9, 9]
    """
    if image.shape[:2] == (height, width):
        return image
    if not bilinear and (height > image.shape[0] or width > image.shape[1]):
        # Enlarged noise may differ by 2 from Pillow's, so it is Pillow's.
        return np.array(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
    torch = sys.modules.get("torch")
    if torch is None:
        return resample_numpy(image, width, height, bilinear)
    pixels = torch.from_numpy(image[None]).permute(0, 3, 1, 2)  # channels last, the fast kernel's
    mode = "bilinear" if bilinear else "bicubic"
    resized = torch.nn.functional.interpolate(pixels, (height, width), mode=mode, antialias=True)
    result: Pixels = resized[0].permute(1, 2, 0).numpy()
    return result


def resample_numpy(image: Pixels, width: int, height: int, bilinear: bool = False) -> Pixels:
    """`resample` without PyTorch."""
    rows = image.shape[0]
    wide = np.ascontiguousarray(image.transpose(1, 0, 2)).reshape(image.shape[1], -1)  # [W, H * 3]
    narrow = _along(wide, width, bilinear).reshape(width, rows, 3)
    tall = np.ascontiguousarray(narrow.transpose(1, 0, 2)).reshape(rows, -1)  # [H, W * 3]
    return _along(tall, height, bilinear).reshape(height, width, 3)


def _along(lines: Pixels, size: int, bilinear: bool) -> Pixels:
    """Resize the first axis: [n, m] -> [size, m]."""
    if len(lines) == size:
        return lines
    out = np.empty((size, lines.shape[1]), np.uint8)
    for first, start, weights, shift in _filters(len(lines), size, bilinear):
        part = lines[start : start + weights.shape[1]].astype(np.float64)
        # Whole numbers below 2**53: the product is exact in any order.
        steps = np.floor((weights @ part + (1 << (shift - 1))) / (1 << shift))
        out[first : first + len(weights)] = np.clip(steps, 0, 255)
    return out


@lru_cache(maxsize=64)
def _filters(length: int, size: int, bilinear: bool) -> list[tuple[int, int, NDArray[np.float64], int]]:
    """For each block of results: its first result and source, weights [results, sources], the shift."""
    step = length / size
    spread = max(step, 1.0)  # the filter widens when images shrink: antialiasing
    reach = (1.0 if bilinear else 2.0) * spread
    centers = step * (np.arange(size) + 0.5)
    starts = np.maximum((centers - reach + 0.5).astype(np.int64), 0)
    stops = np.minimum((centers + reach + 0.5).astype(np.int64), length)
    taps = np.arange((stops - starts).max())
    source = starts[:, None] + taps
    weights = _kernel((source - centers[:, None] + 0.5) / spread, bilinear) * (source < stops[:, None])
    weights /= weights.sum(1, keepdims=True)
    shift = 0
    while shift < 22 and int(0.5 + weights.max() * (1 << (shift + 1))) < 1 << 15:
        shift += 1
    numbers = np.trunc(weights * (1 << shift) + np.copysign(0.5, weights))
    blocks = []
    for first in range(0, size, _BLOCK):
        last = min(first + _BLOCK, size)
        start, stop = starts[first], stops[first:last].max()
        block = np.zeros((last - first, stop - start))
        for row in range(first, last):
            block[row - first, starts[row] - start : stops[row] - start] = numbers[
                row, : stops[row] - starts[row]
            ]
        blocks.append((first, int(start), block, shift))
    return blocks


def _kernel(x: NDArray[np.float64], bilinear: bool) -> NDArray[np.float64]:
    x = np.abs(x)
    if bilinear:
        return np.maximum(1 - x, 0)
    a = -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    result: NDArray[np.float64] = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return result
