"""The twelve plain shapes."""

from __future__ import annotations

from dear.world.sdf import (
    arc_points,
    box,
    circle,
    minus,
    polygon,
    regular,
    star_points,
    union,
)
from dear.world.sdf import ring as circle_stroke
from dear.world.sprites.base import Sprite

_HEART = [
    *arc_points(0.46, 0.38, 0.46, 0.46, -10, 180, 16),
    *arc_points(-0.46, 0.38, 0.46, 0.46, 0, 190, 16),
    (0.0, -0.88),
]

SHAPES: dict[str, Sprite] = {
    "circle": Sprite(circle(0, 0, 0.86)),
    "square": Sprite(box(0, 0, 1.56, 1.56)),
    "triangle": Sprite(polygon([(0, 0.92), (-0.95, -0.72), (0.95, -0.72)])),
    "star": Sprite(polygon(star_points(5, 1.0, 0.44))),
    "heart": Sprite(polygon(_HEART)),
    "diamond": Sprite(polygon([(0, 1.0), (-0.62, 0), (0, -1.0), (0.62, 0)])),
    "cross": Sprite(union(box(0, 0, 0.62, 1.8), box(0, 0, 1.8, 0.62))),
    "crescent": Sprite(minus(circle(-0.05, 0, 0.94), circle(0.42, 0.08, 0.74))),
    "ring": Sprite(circle_stroke(0, 0, 0.66, 0.46)),
    "arrow": Sprite(
        polygon(
            [(-0.95, 0.3), (0.05, 0.3), (0.05, 0.8), (0.98, 0), (0.05, -0.8), (0.05, -0.3), (-0.95, -0.3)]
        )
    ),
    "hexagon": Sprite(polygon(regular(6, 0.94, 0))),
    "bolt": Sprite(
        polygon(
            [
                (0.3, 1.0),
                (-0.62, -0.12),
                (-0.06, -0.12),
                (-0.34, -1.0),
                (0.64, 0.24),
                (0.06, 0.24),
                (0.56, 1.0),
            ]
        )
    ),
}
