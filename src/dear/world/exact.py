"""Arithmetic whose results are the same bits on every CPU and build of PyTorch, and noise to go with it.

Only operations that IEEE 754 rounds correctly (add, multiply, divide, floor, square root, comparisons) are
used per pixel: no sine, no fused multiply-add, no sums over many elements, whose bits depend on the
processor, the library or the number of threads. Waves are parabolas; rotations come from half-angle
tangents. `torch.sqrt` is not one of them: builds of PyTorch with Intel's MKL leave it to that library, which
on some processors misses the correctly rounded value in one of five cases; `sqrt` is used instead.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

TILE = 128


def fraction(t: Tensor) -> Tensor:
    """The part after the point, in 0..1."""
    return t - t.floor()


def sqrt(t: Tensor) -> Tensor:
    """The correctly rounded square root; see the top of this module.

    NumPy uses the processor's instruction, which IEEE 754 specifies; so does PyTorch on a GPU.

    >>> sqrt(torch.tensor([2.0])).item() == 2**0.5 // 2**-23 * 2**-23  # 1.41421354: 2**0.5 in 24 bits
    True
    """
    if t.device.type != "cpu":
        return torch.sqrt(t)
    return torch.from_numpy(np.sqrt(np.atleast_1d(t.numpy()))).view(t.shape)


def wave(t: Tensor) -> Tensor:
    """A smooth wave of period 1 between -1 and 1, zero at 0 (two parabolas, within 6 % of a sine)."""
    u = fraction(t) - 0.5
    return u * (u.abs() - 0.5) * 16.0


def zigzag(t: Tensor) -> Tensor:
    """A triangle wave of period 1 between -1 and 1."""
    return (fraction(t) - 0.5).abs() * 4.0 - 1.0


def rotation(half_tangent: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of an angle given as the tangent of its half."""
    square = half_tangent * half_tangent
    return (1 - square) / (1 + square), 2 * half_tangent / (1 + square)


def column(values: Tensor) -> Tensor:
    """[b] to [b, 1, 1], to be combined with images of one channel."""
    return values.view(-1, 1, 1)


@lru_cache(maxsize=8)
def noise_tiles(device: str) -> Tensor:
    """float32 [4, TILE, TILE] in 0..1: noise of grain 1, 2, 6 and 16 pixels that wraps around."""
    if device != "cpu":
        return noise_tiles("cpu").to(device)
    generator = torch.Generator().manual_seed(20240229)
    tiles = [torch.rand(TILE, TILE, generator=generator)]
    for cells in (64, 20, 8):
        grid = torch.rand(cells, cells, generator=generator)
        tiles.append(_smooth(grid))
    return torch.stack(tiles)


def _smooth(grid: Tensor) -> Tensor:
    """A wrapping grid enlarged to a tile by smooth interpolation."""
    cells = grid.shape[0]
    position = torch.arange(TILE, dtype=torch.float32) * cells / TILE
    low = position.floor().long()
    t = position - low
    t = t * t * (3 - 2 * t)
    high = (low + 1) % cells
    rows = grid[low] + (grid[high] - grid[low]) * t[:, None]
    result = rows[:, low] + (rows[:, high] - rows[:, low]) * t[None, :]
    return (result - result.min()) / (result.max() - result.min())


def noise(grain: int, x: Tensor, y: Tensor, side: int) -> Tensor:
    """float32 [b, side, side]: a window of a noise tile; `x` and `y` [b] in 0..1 say where."""
    tile = noise_tiles(str(x.device))[grain]
    steps = torch.arange(side, device=x.device)
    columns = ((x * TILE).floor().long()[:, None] + steps) % TILE
    rows = ((y * TILE).floor().long()[:, None] + steps) % TILE
    return tile.flatten()[rows[:, :, None] * TILE + columns[:, None, :]]
