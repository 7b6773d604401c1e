"""The places: backgrounds painted from gradients, hills, waves and blocks.

Each painter takes the scenes of one place and returns images [b, 3, side, side] in 0..1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dear.world.exact import column, fraction, noise, sqrt, wave, zigzag
from dear.world.scenes import Scenes

RGB = tuple[float, float, float]


class Easel:
    """Images in the making: coordinates in 0..1 from the top left, and layers painted over each other."""

    def __init__(self, scenes: Scenes, side: int) -> None:
        axis = (torch.arange(side, device=scenes.device, dtype=torch.float32) + 0.5) / side
        self.x, self.y, self.side = axis.view(1, 1, -1), axis.view(1, -1, 1), side
        self.scenes = scenes
        self.pixels = torch.empty(len(scenes), 3, side, side, device=scenes.device)

    def variation(self, index: int) -> Tensor:
        """float32 [b, 1, 1]: unnamed variation of the place, 0..1."""
        return column(self.scenes.variation(f"place_{index}"))

    def noise(self, grain: int) -> Tensor:
        """float32 [b, side, side] in 0..1."""
        return noise(grain, self.scenes.variation("noise_x"), self.scenes.variation("noise_y"), self.side)

    def edge(self, distance: Tensor) -> Tensor:
        """Softened step: 0 where the distance (in image sides) is negative, 1 where positive."""
        return (distance * float(self.side) + 0.5).clamp(0, 1)

    def gradient(self, top: RGB, bottom: RGB, reach: float = 1.0) -> None:
        """Fill everything from one color down to another."""
        t = (self.y / reach).clamp(0, 1)
        for channel in range(3):
            self.pixels[:, channel] = top[channel] + (bottom[channel] - top[channel]) * t

    def paint(self, color: RGB | list[Tensor], weight: Tensor) -> None:
        """Blend a color into the image by `weight` [b, side, side] (or broadcastable)."""
        for channel in range(3):
            layer = self.pixels[:, channel]
            layer += (color[channel] - layer) * weight

    def shade(self, amount: Tensor) -> None:
        """Add to all channels."""
        self.pixels += amount.unsqueeze(1)


def _sun(easel: Easel, color: RGB) -> None:
    dx = easel.x - (0.1 + 0.8 * easel.variation(5))
    dy = easel.y - (0.08 + 0.12 * easel.variation(6))
    easel.paint(color, easel.edge(0.075 - sqrt(dx * dx + dy * dy)))


def _flecks(easel: Easel, columns: float, first: int, radius: float) -> tuple[Tensor, Tensor]:
    """Discs in nine rows, each somewhere in its cell: a number for every cell, and where the discs are."""
    x, y = easel.x * columns + easel.variation(first) * 3.0, easel.y * 9.0 + easel.variation(first + 1) * 3.0
    cell = x.floor() * 0.618 + y.floor() * 0.733 + easel.variation(first + 2)
    dx = fraction(x) - 0.3 - 0.4 * fraction(cell * 3.7)
    dy = fraction(y) - 0.3 - 0.4 * fraction(cell * 5.3)
    return cell, easel.edge((radius - sqrt(dx * dx + dy * dy)) / 9.0)


def _studio(easel: Easel) -> None:
    tones = [0.66 + 0.26 * easel.variation(i) for i in range(3)]
    mean = (tones[0] + tones[1] + tones[2]) / 3.0
    dx, dy = easel.x - 0.5, easel.y - 0.45
    fall = 1.04 - (dx * dx + dy * dy) * (0.35 + 0.3 * easel.variation(3))
    for channel in range(3):
        easel.pixels[:, channel] = (tones[channel] + mean) * 0.5 * fall


def _beach(easel: Easel) -> None:
    horizon = 0.26 + 0.12 * easel.variation(0)
    shore = horizon + 0.22 + 0.06 * easel.variation(1) + 0.02 * wave(easel.x * 2.0 + easel.variation(2))
    easel.gradient((0.42, 0.72, 0.95), (0.80, 0.92, 0.98), 0.4)
    _sun(easel, (1.0, 0.95, 0.70))
    easel.paint((0.10, 0.56, 0.72), easel.edge(easel.y - horizon))
    crest = wave(easel.x * 4.0 + easel.variation(3) + easel.y * 3.0) * 0.006
    foam = wave((easel.y + crest - horizon) * 16.0 + easel.variation(4)) - 0.55
    easel.paint((0.62, 0.88, 0.92), (foam * 1.6).clamp(0, 1) * easel.edge(easel.y - horizon))
    easel.paint((0.97, 0.98, 0.96), easel.edge(easel.y - shore + 0.03))
    easel.paint((0.93, 0.83, 0.60), easel.edge(easel.y - shore))
    easel.shade((easel.noise(0) - 0.5) * 0.07 * easel.edge(easel.y - shore))


def _forest(easel: Easel) -> None:
    easel.gradient((0.20, 0.40, 0.20), (0.10, 0.26, 0.12))
    for depth, (wood, count) in enumerate((((0.24, 0.26, 0.16), 7.0), ((0.30, 0.20, 0.12), 4.0))):
        place = easel.x * count + easel.variation(depth) * 5.0
        cell = place.floor()
        offset = fraction(cell * 0.381 + easel.variation(2)) * 0.5 - 0.25
        width = 0.13 + 0.06 * fraction(cell * 0.617 + easel.variation(3))
        inside = width - (fraction(place) - 0.5 - offset).abs()
        easel.paint(wood, easel.edge(inside / count) * easel.edge(0.88 - easel.y))
    leaves = easel.noise(2) * 0.26 + easel.noise(3) * 0.2
    easel.paint((0.13, 0.44, 0.16), easel.edge((leaves + 0.14 - easel.y) * 0.5))
    easel.paint(
        (0.30, 0.62, 0.24), easel.edge((easel.noise(1) - 0.72) * 0.2) * easel.edge(leaves + 0.1 - easel.y)
    )
    easel.paint((0.22, 0.34, 0.12), easel.edge(easel.y - 0.86 + (easel.noise(2) - 0.5) * 0.08))


def _desert(easel: Easel) -> None:
    easel.gradient((0.98, 0.76, 0.46), (0.99, 0.90, 0.70), 0.55)
    _sun(easel, (1.0, 0.98, 0.86))
    for depth, tone in enumerate(((0.90, 0.62, 0.34), (0.83, 0.51, 0.25), (0.74, 0.42, 0.19))):
        base = 0.42 + 0.2 * depth + 0.06 * easel.variation(depth)
        dune = base + 0.075 * wave(easel.x * (0.9 + 0.25 * depth) + easel.variation(3 + depth))
        below = easel.y - dune
        easel.paint(tone, easel.edge(below))
        ripple = wave((easel.y - dune) * 22.0) * 0.022
        easel.shade(ripple * easel.edge(below))


def _snow(easel: Easel) -> None:
    easel.gradient((0.62, 0.70, 0.80), (0.84, 0.88, 0.93), 0.6)
    for depth, tone in enumerate(((0.84, 0.89, 0.95), (0.95, 0.97, 1.0))):
        hill = 0.46 + 0.2 * depth + 0.06 * easel.variation(depth)
        hill = hill + 0.06 * wave(easel.x * (0.8 + 0.5 * depth) + easel.variation(2 + depth))
        below = easel.edge(easel.y - hill)
        easel.paint(tone, below)
        if depth == 0:
            spruce = zigzag(easel.x * 7.0 + easel.variation(4)) * 0.5 + 0.5
            easel.paint((0.24, 0.38, 0.38), easel.edge(easel.y - hill + 0.11 * spruce - 0.02) * (1 - below))
    _, flakes = _flecks(easel, 9.0, 5, 0.17)
    easel.paint((1.0, 1.0, 1.0), flakes)


def _city(easel: Easel) -> None:
    easel.gradient((0.52, 0.60, 0.76), (0.94, 0.80, 0.74), 0.8)
    for depth, (tone, count, low) in enumerate(
        (((0.46, 0.48, 0.58), 7.0, 0.24), ((0.25, 0.27, 0.36), 5.0, 0.40))
    ):
        place = easel.x * count + easel.variation(depth) * 7.0
        cell = place.floor()
        roof = low + 0.26 * fraction(fraction(cell * 0.754) * 7.31 + easel.variation(2 + depth))
        inside = easel.edge(easel.y - roof) * easel.edge((0.46 - (fraction(place) - 0.5).abs()) / count)
        easel.paint(tone, inside)
        if depth == 1:
            column_index, row_index = (place * 3.0).floor(), (easel.y * 16.0).floor()
            lit = (
                fraction(fraction(column_index * 0.618 + row_index * 0.414 + easel.variation(4)) * 9.7) > 0.45
            )
            wx, wy = (fraction(place * 3.0) - 0.5).abs(), (fraction(easel.y * 16.0) - 0.5).abs()
            window = ((wx < 0.3) & (wy < 0.3) & lit).float() * easel.edge(easel.y - roof - 0.05)
            easel.paint((0.99, 0.86, 0.48), window * inside)
    easel.paint((0.22, 0.22, 0.25), easel.edge(easel.y - 0.88))
    easel.paint(
        (0.85, 0.85, 0.82), easel.edge(0.012 - (easel.y - 0.94).abs()) * (fraction(easel.x * 5.0) < 0.55)
    )


def _room(easel: Easel) -> None:
    floor = 0.68 + 0.08 * easel.variation(0)
    warm = 0.06 * easel.variation(1)
    easel.gradient((0.90, 0.84, 0.72), (0.84, 0.76, 0.63))
    easel.shade(0.025 * wave(easel.x * 9.0) + warm - 0.03 + 0.0 * easel.y)
    cx, cy = 0.18 + 0.64 * easel.variation(2), 0.26 + 0.06 * easel.variation(3)
    dx, dy = (easel.x - cx).abs(), (easel.y - cy).abs()
    frame = torch.maximum(dx, dy)
    easel.paint((0.98, 0.98, 0.96), easel.edge(0.19 - frame))
    easel.paint((0.58, 0.80, 0.95), easel.edge(0.155 - frame) * easel.edge(torch.minimum(dx, dy) - 0.014))
    easel.paint((0.60, 0.38, 0.20), easel.edge(easel.y - floor))
    plank = (easel.x - 0.5) / (easel.y + 0.25)
    seam = ((fraction(plank * 7.0) - 0.5).abs() > 0.45).float()
    easel.paint((0.42, 0.25, 0.12), seam * easel.edge(easel.y - floor))
    easel.paint((0.97, 0.95, 0.90), easel.edge(0.016 - (easel.y - floor).abs()))


def _ocean(easel: Easel) -> None:
    horizon = 0.18 + 0.1 * easel.variation(0)
    easel.gradient((0.60, 0.80, 0.94), (0.86, 0.93, 0.96), 0.3)
    below = easel.y - horizon
    easel.paint((0.06, 0.34, 0.62), easel.edge(below))
    swell = below * (9.0 - 3.0 * below) + 0.13 * wave(easel.x * 2.2 + easel.variation(1) + below * 2.0)
    crest = (0.12 - (fraction(swell + easel.variation(2)) - 0.5).abs()) * 5.0
    easel.paint((0.55, 0.78, 0.90), crest.clamp(0, 1) * easel.edge(below) * 0.8)
    easel.shade((easel.noise(2) - 0.5) * 0.1 * easel.edge(below))


def _space(easel: Easel) -> None:
    easel.gradient((0.02, 0.02, 0.07), (0.07, 0.04, 0.14))
    mist = (easel.noise(3) - 0.45).clamp_min(0) * 0.4
    easel.pixels[:, 0] += mist * (0.4 + 0.6 * easel.variation(0))
    easel.pixels[:, 2] += mist
    stars = (easel.noise(0) - 0.972).clamp_min(0) * 60.0
    easel.shade(stars.clamp_max(0.95))
    dx = easel.x - (0.12 + 0.76 * easel.variation(1))
    dy = easel.y - (0.12 + 0.2 * easel.variation(2))
    radius = 0.1 + 0.05 * easel.variation(3)
    distance = sqrt(dx * dx + dy * dy)
    light = (0.75 + (dx + dy) * -2.4).clamp(0.1, 1.0)
    planet = [tone * light for tone in (0.86, 0.70, 0.52)]
    easel.paint(planet, easel.edge(radius - distance))
    tilted = dx * 0.35 + dy
    orbit = sqrt(dx * dx * 0.3 + tilted * tilted * 4.0)
    easel.paint((0.82, 0.78, 0.70), easel.edge(0.014 - (orbit - radius * 0.95).abs()) * 0.8)


def _mountains(easel: Easel) -> None:
    easel.gradient((0.44, 0.66, 0.90), (0.84, 0.91, 0.96), 0.6)
    for depth, (tone, low) in enumerate((((0.56, 0.62, 0.72), 0.44), ((0.38, 0.42, 0.50), 0.62))):
        scale = 1.6 + 0.3 * depth
        peak = zigzag(easel.x * scale + easel.variation(depth)) * 0.19
        peak = peak + zigzag(easel.x * scale * 2.7 + easel.variation(2 + depth)) * 0.06
        ridge = low - peak + (easel.noise(2) - 0.5) * 0.03
        easel.paint(tone, easel.edge(easel.y - ridge))
        cap = easel.edge(easel.y - ridge) * easel.edge(low - 0.07 + zigzag(easel.x * 9.0) * 0.03 - easel.y)
        easel.paint((0.97, 0.98, 1.0), cap)
    meadow = 0.84 + 0.02 * wave(easel.x * 1.5 + easel.variation(4))
    easel.paint((0.36, 0.50, 0.32), easel.edge(easel.y - meadow))


def _meadow(easel: Easel) -> None:
    horizon = 0.42 + 0.08 * easel.variation(0) + 0.04 * wave(easel.x * 0.9 + easel.variation(1))
    easel.gradient((0.36, 0.68, 0.96), (0.78, 0.90, 0.99), 0.5)
    cloud = easel.noise(3) + easel.noise(2) * 0.35 - 0.86
    easel.paint((1.0, 1.0, 1.0), (cloud * 6.0).clamp(0, 0.9) * easel.edge(horizon - 0.06 - easel.y))
    below = easel.edge(easel.y - horizon)
    easel.paint((0.45, 0.76, 0.26), below)
    easel.shade((easel.noise(1) - 0.5) * 0.16 * below)
    cell, blossoms = _flecks(easel, 8.0, 2, 0.2)
    hue = fraction(cell * 2.9)
    easel.paint([0.98 + 0.0 * hue, 0.55 + 0.45 * hue, 0.75 - 0.4 * hue], blossoms * below)


def _road(easel: Easel) -> None:
    horizon = 0.34 + 0.08 * easel.variation(0)
    easel.gradient((0.62, 0.76, 0.90), (0.90, 0.93, 0.95), 0.45)
    below = easel.y - horizon
    ground = easel.edge(below)
    hedge = easel.edge(easel.y - horizon + 0.05 + easel.noise(2) * 0.06)
    easel.paint((0.24, 0.40, 0.24), hedge)
    easel.paint((0.55, 0.60, 0.36), ground)
    center = 0.35 + 0.3 * easel.variation(1)
    aside = (easel.x - center - below * (0.5 - center) * 1.5).abs()
    half = 0.03 + below * 0.95
    easel.paint((0.34, 0.34, 0.37), easel.edge(half - aside) * ground)
    easel.paint((0.95, 0.95, 0.92), easel.edge(0.018 + below * 0.02 - (aside - half * 0.9).abs()) * ground)
    dash = (fraction(0.55 / (below.clamp_min(0.0) + 0.12) + easel.variation(2)) < 0.55).float()
    easel.paint((0.98, 0.82, 0.25), easel.edge(0.006 + below * 0.05 - aside) * ground * dash)


#: by row of `factors.PLACES`
PAINTERS: tuple[Callable[[Easel], None], ...] = (
    _studio, _beach, _forest, _desert, _snow, _city, _room, _ocean, _space, _mountains, _meadow, _road
)  # fmt: skip


def backdrop(place: int, scenes: Scenes, side: int) -> Tensor:
    """float32 [b, 3, side, side]: the background of one place."""
    easel = Easel(scenes, side)
    PAINTERS[place](easel)
    return easel.pixels
