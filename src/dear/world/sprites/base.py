"""What a sprite is: up to four layers of parts, painted in this order."""

from __future__ import annotations

from dataclasses import dataclass

from dear.world.sdf import Part

RGB = tuple[float, float, float]


@dataclass(frozen=True)
class Sprite:
    """A subject's drawing.

    Attributes:
        body: takes the scene's color and texture.
        accent: painted over the body in the sprite's own `tint`.
        light: painted near white (windows, eyes).
        dark: painted near black (wheels, pupils, strokes).
        tint: the accent's color.
    """

    body: Part | None = None
    accent: Part | None = None
    light: Part | None = None
    dark: Part | None = None
    tint: RGB = (0.45, 0.38, 0.33)
