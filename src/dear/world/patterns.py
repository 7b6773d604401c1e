"""The textures: where a surface carries its second tone.

A pattern is a function of pattern coordinates (one period is one unit). It returns how far inside a mark a
point is, in periods; edges are softened over one pixel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dear.world import factors as F
from dear.world.exact import column, fraction, noise, rotation, sqrt, wave, zigzag
from dear.world.scenes import Scenes

Pattern = Callable[[Tensor, Tensor, Scenes], Tensor]


def _triangle(t: Tensor) -> Tensor:
    """Distance to the nearest integer, 0..0.5."""
    return 0.5 - (fraction(t) - 0.5).abs()


def _dotted(p: Tensor, q: Tensor, scenes: Scenes) -> Tensor:
    row = (q * 1.1).floor()
    x = fraction(p + row * 0.5) - 0.5
    y = fraction(q * 1.1) - 0.5
    return 0.31 - sqrt(x * x + y * y)


def _speckled(p: Tensor, q: Tensor, scenes: Scenes) -> Tensor:
    # Small specks of uneven size, some cells empty, none in line with its neighbors.
    x, y = p * 1.9, q * 1.9
    cell = fraction(x.floor() * 0.6180 + y.floor() * 0.4142) * 7.13
    dx = fraction(x) - 0.28 - 0.44 * fraction(cell * 3.7)
    dy = fraction(y) - 0.28 - 0.44 * fraction(cell * 5.3)
    radius = 0.42 * fraction(cell * 2.3) - 0.04
    return (radius - sqrt(dx * dx + dy * dy)) / 1.9


def _scaly(p: Tensor, q: Tensor, scenes: Scenes) -> Tensor:
    # Rows of discs, each half a disc aside and hanging over the row below: what shows is every lower rim.
    height = 0.42
    x, y = p * 0.95, q * 0.95 / height
    row = y.floor()
    down = (y - row) * height
    odd = row * 0.5
    aside, mine = fraction(x + odd) - 0.5, fraction(x + odd + 0.5) - 0.5
    upper = 0.56 - sqrt(aside * aside + (down + height) * (down + height))
    middle = 0.56 - sqrt(mine * mine + down * down)
    lower = 0.56 - sqrt(aside * aside + (height - down) * (height - down))
    rim = torch.where(upper > 0, upper, torch.where(middle > 0, middle, lower))
    return 0.12 - rim


def _honeycomb(p: Tensor, q: Tensor, scenes: Scenes) -> Tensor:
    # Two interleaved lattices of cells; a point belongs to the nearer center.
    x, y = p * 0.8, q * 0.8
    root3 = 1.7320508
    ax, ay = fraction(x) - 0.5, (fraction(y / root3) - 0.5) * root3
    bx, by = fraction(x + 0.5) - 0.5, (fraction(y / root3 + 0.5) - 0.5) * root3
    first = ax * ax + ay * ay < bx * bx + by * by
    hx, hy = torch.where(first, ax, bx).abs(), torch.where(first, ay, by).abs()
    border = 0.5 - torch.maximum(hx, hx * 0.5 + hy * 0.8660254)
    return 0.1 - border


def _marbled(p: Tensor, q: Tensor, scenes: Scenes) -> Tensor:
    side = p.shape[-1]
    slow = noise(3, scenes.variation("noise_x"), scenes.variation("noise_y"), side)
    fast = noise(2, scenes.variation("noise_y"), scenes.variation("noise_x"), side)
    vein = _triangle(p * 0.45 + slow * 2.4 + fast * 0.5)
    return (0.11 - vein) * 1.2


PATTERNS: dict[str, Pattern] = {
    "striped": lambda p, q, scenes: _triangle(p) - 0.25,
    "dotted": _dotted,
    "checkered": lambda p, q, scenes: (_triangle(p * 0.7) - 0.25) * (_triangle(q * 0.7) - 0.25) * 8.0,
    "wavy": lambda p, q, scenes: _triangle(p * 0.9 + wave(q * 0.36) * 0.42) - 0.25,
    "zigzag": lambda p, q, scenes: (_triangle(p * 0.8 + zigzag(q * 0.55) * 0.5) - 0.25) * 0.8,
    "brick": lambda p, q, scenes: (
        0.1 - torch.minimum(_triangle(q), _triangle(p * 0.5 + q.floor() * 0.5) * 2.0)
    ),
    "grid": lambda p, q, scenes: 0.13 - torch.minimum(_triangle(p * 0.9), _triangle(q * 0.9)),
    "speckled": _speckled,
    "scaly": _scaly,
    "honeycomb": _honeycomb,
    "marbled": _marbled,
}


def marks(texture: int, scenes: Scenes, side: int) -> Tensor | None:
    """float32 [b, side, side] in 0..1, how much of a pixel is mark; None where the texture is plain."""
    name = F.TEXTURES[texture][0]
    if name == "plain":
        return None
    period = (6.6 + 2.6 * scenes.variation("period")) * (side / 64)
    period = torch.where(scenes.count > 1, period * 0.8, period)
    cos, sin = rotation((scenes.variation("pattern_turn") - 0.5) * 0.34)
    if name not in ("brick", "scaly"):  # these stay upright
        swap = scenes.variation("pattern_swap") < 0.5
        cos, sin = torch.where(swap, -sin, cos), torch.where(swap, cos, sin)
    axis = torch.arange(side, device=scenes.device, dtype=torch.float32) + 0.5
    x, y = axis.view(1, 1, -1), axis.view(1, -1, 1)
    shift_p, shift_q = scenes.variation("pattern_x") * 4.0, scenes.variation("pattern_y") * 4.0
    p = x * column(cos / period) + (y * column(sin / period) + column(shift_p))
    q = y * column(cos / period) - (x * column(sin / period) - column(shift_q))
    return (PATTERNS[name](p, q, scenes) * column(period) + 0.5).clamp_(0, 1)
