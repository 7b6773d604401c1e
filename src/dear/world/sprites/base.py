"""What a sprite is: up to four layers of parts, painted in this order."""

from __future__ import annotations

from dataclasses import dataclass

from dear.world.sdf import Part

RGB = tuple[float, float, float]


@dataclass(frozen=True)
class Sprite:
    """A subject's drawing."""

    body: Part | None = None  #: takes the scene's color and texture
    accent: Part | None = None  #: painted over the body in the sprite's own `tint`
    light: Part | None = None  #: painted near white (windows, eyes)
    dark: Part | None = None  #: painted near black (wheels, pupils, strokes)
    tint: RGB = (0.45, 0.38, 0.33)  #: the accent's color
