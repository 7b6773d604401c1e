"""Signed distance fields of simple parts, from which every sprite is composed.

A part is a function of the coordinates (x to the right, y up, the sprite within -1..1) that returns the
distance to its edge, negative inside. `union`, `difference` and `intersection` combine parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from dear.world.exact import sqrt

Part = Callable[[Tensor, Tensor], Tensor]
Point = tuple[float, float]


def _turn(x: Tensor, y: Tensor, cx: float, cy: float, degrees: float) -> tuple[Tensor, Tensor]:
    """Coordinates in a frame centered on (cx, cy) and turned counter-clockwise."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    dx, dy = x - cx, y - cy
    return dx * c + dy * s, dy * c - dx * s


def _length(x: Tensor, y: Tensor) -> Tensor:
    return sqrt(x * x + y * y)


def circle(cx: float, cy: float, radius: float) -> Part:
    """A disc."""
    return lambda x, y: _length(x - cx, y - cy) - radius


def ellipse(cx: float, cy: float, rx: float, ry: float, degrees: float = 0.0) -> Part:
    """An ellipse; the distance is a first-order estimate, exact at the edge."""

    def distance(x: Tensor, y: Tensor) -> Tensor:
        u, v = _turn(x, y, cx, cy, degrees)
        scaled = _length(u / rx, v / ry)
        slope = _length(u / rx**2, v / ry**2).clamp_min(1e-6)
        return scaled * (scaled - 1) / slope

    return distance


def box(cx: float, cy: float, width: float, height: float, round: float = 0.0, degrees: float = 0.0) -> Part:
    """A box of full width and height, its corners rounded by a radius."""

    def distance(x: Tensor, y: Tensor) -> Tensor:
        u, v = _turn(x, y, cx, cy, degrees)
        dx, dy = u.abs() - width / 2 + round, v.abs() - height / 2 + round
        outside = _length(dx.clamp_min(0), dy.clamp_min(0))
        return outside + torch.maximum(dx, dy).clamp_max(0) - round

    return distance


def polygon(points: Sequence[Point], round: float = 0.0) -> Part:
    """A closed polygon (either orientation), optionally grown by a radius that rounds its corners."""
    closed = [*points, points[0]]

    def distance(x: Tensor, y: Tensor) -> Tensor:
        nearest, inside = _nearest(x, y, closed), torch.zeros_like(x, dtype=torch.bool)
        for (ax, ay), (bx, by) in pairwise(closed):
            if ay != by:
                crosses = (y < ay) != (y < by)
                inside ^= crosses & (x < (bx - ax) * (y - ay) / (by - ay) + ax)
        return torch.where(inside, -nearest, nearest) - round

    return distance


def line(points: Sequence[Point], width: float) -> Part:
    """A stroke of full width along points, with round ends."""
    return lambda x, y: _nearest(x, y, points) - width / 2


def _nearest(x: Tensor, y: Tensor, points: Sequence[Point]) -> Tensor:
    """The distance to the segments between points."""
    nearest = torch.full_like(x, 1e9)
    for (ax, ay), (bx, by) in pairwise(points):
        dx, dy = bx - ax, by - ay
        along = ((x - ax) * dx + (y - ay) * dy) / max(dx * dx + dy * dy, 1e-12)
        along = along.clamp(0, 1)
        nearest = torch.minimum(nearest, _length(x - ax - along * dx, y - ay - along * dy))
    return nearest


def arc_points(
    cx: float, cy: float, rx: float, ry: float, start: float, end: float, steps: int = 14
) -> list[Point]:
    """Points along an elliptic arc from `start` to `end` degrees, counter-clockwise from the right."""
    angles = [math.radians(start + (end - start) * i / steps) for i in range(steps + 1)]
    return [(cx + rx * math.cos(a), cy + ry * math.sin(a)) for a in angles]


def arc(cx: float, cy: float, rx: float, ry: float, start: float, end: float, width: float) -> Part:
    """A stroke along an elliptic arc."""
    return line(arc_points(cx, cy, rx, ry, start, end), width)


def ring(cx: float, cy: float, radius: float, width: float) -> Part:
    """A circle's stroke."""
    return lambda x, y: (_length(x - cx, y - cy) - radius).abs() - width / 2


def union(*parts: Part) -> Part:
    """The union of the parts."""
    return lambda x, y: reduce(torch.minimum, (part(x, y) for part in parts))


def difference(part: Part, *cuts: Part) -> Part:
    """The part without the cuts."""
    return lambda x, y: reduce(torch.maximum, (-cut(x, y) for cut in cuts), part(x, y))


def intersection(*parts: Part) -> Part:
    """The intersection of the parts."""
    return lambda x, y: reduce(torch.maximum, (part(x, y) for part in parts))


def star_points(points: int, outer: float, inner: float, turn: float = 90.0) -> list[Point]:
    """The corners of a star with its first ray at `turn` degrees; `inner == outer` is a polygon."""
    angles = [math.radians(turn + 180.0 * i / points) for i in range(2 * points)]
    radii = [outer, inner] * points
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]
