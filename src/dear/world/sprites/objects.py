"""Everyday objects."""

from __future__ import annotations

import math

from dear.world.sdf import arc, both, box, circle, ellipse, line, minus, polygon, ring, union
from dear.world.sprites.base import Sprite

_WOOD = (0.47, 0.33, 0.22)
_LEAF = (0.30, 0.55, 0.25)
_BRASS = (0.80, 0.74, 0.60)
_ROOF = (0.36, 0.28, 0.28)

OBJECTS: dict[str, Sprite] = {
    "house": Sprite(
        body=box(0, -0.38, 1.5, 1.04),
        accent=union(polygon([(-1.0, 0.12), (0, 0.98), (1.0, 0.12)]), box(0.52, 0.62, 0.24, 0.5)),
        light=union(box(-0.4, -0.2, 0.36, 0.36), box(0.42, -0.2, 0.36, 0.36)),
        dark=box(0.0, -0.66, 0.3, 0.5),
        tint=_ROOF,
    ),
    "tree": Sprite(
        body=union(circle(0, 0.48, 0.5), circle(-0.46, 0.12, 0.44), circle(0.46, 0.12, 0.44)),
        accent=polygon([(-0.14, -0.1), (0.14, -0.1), (0.2, -1.0), (-0.2, -1.0)]),
        tint=_WOOD,
    ),
    "cup": Sprite(
        body=union(
            polygon([(-0.78, 0.62), (0.5, 0.62), (0.4, -0.72), (-0.68, -0.72)], 0.04),
            minus(ring(0.5, 0.0, 0.38, 0.17), box(-0.2, 0, 1.3, 1.4)),
        ),
        dark=ellipse(-0.14, 0.64, 0.6, 0.12),
    ),
    "umbrella": Sprite(
        body=minus(
            both(circle(0, 0.0, 0.97), box(0, 0.55, 2.2, 1.1)),
            ellipse(-0.65, 0.0, 0.32, 0.16),
            ellipse(0, 0.0, 0.33, 0.16),
            ellipse(0.65, 0.0, 0.32, 0.16),
        ),
        dark=union(
            line([(0, 0.12), (0, -0.76)], 0.11),
            arc(0.18, -0.76, 0.18, 0.18, 180, 360, 0.11),
            circle(0, 1.0, 0.06),
        ),
    ),
    "chair": Sprite(
        body=union(
            box(-0.52, 0.42, 0.24, 1.1, 0.05),
            box(0.0, -0.14, 1.28, 0.26, 0.05),
        ),
        accent=union(
            line([(-0.52, -0.2), (-0.56, -0.95)], 0.15),
            line([(0.5, -0.2), (0.54, -0.95)], 0.15),
            line([(-0.5, -0.6), (0.5, -0.6)], 0.1),
        ),
        tint=_WOOD,
    ),
    "lamp": Sprite(
        body=polygon([(-0.36, 0.95), (0.36, 0.95), (0.74, 0.12), (-0.74, 0.12)]),
        accent=union(box(0, -0.3, 0.16, 0.9), ellipse(0, -0.82, 0.5, 0.16)),
        light=ellipse(0, 0.1, 0.2, 0.13),
        tint=_BRASS,
    ),
    "bottle": Sprite(
        body=union(
            box(0, -0.38, 0.82, 1.22, 0.12),
            polygon([(-0.41, 0.12), (0.41, 0.12), (0.17, 0.5), (-0.17, 0.5)]),
            box(0, 0.6, 0.32, 0.4),
        ),
        light=box(0, -0.4, 0.82, 0.4),
        dark=box(0, 0.88, 0.4, 0.2, 0.04),
    ),
    "hat": Sprite(
        body=union(
            polygon([(-0.52, 0.72), (0.52, 0.72), (0.44, -0.4), (-0.44, -0.4)], 0.04),
            ellipse(0, -0.44, 0.98, 0.22),
        ),
        dark=polygon([(-0.47, -0.1), (0.47, -0.1), (0.455, -0.32), (-0.455, -0.32)]),
    ),
    "flower": Sprite(
        body=union(
            *(
                ellipse(
                    0.38 * math.cos(math.radians(a)),
                    0.36 + 0.38 * math.sin(math.radians(a)),
                    0.28,
                    0.2,
                    a,
                )
                for a in range(18, 378, 72)
            )
        ),
        accent=union(line([(0, 0.1), (0.02, -0.98)], 0.1), ellipse(0.26, -0.56, 0.28, 0.12, 32)),
        light=circle(0, 0.36, 0.17),
        tint=_LEAF,
    ),
    "key": Sprite(
        body=union(
            ring(-0.52, 0, 0.32, 0.24),
            box(0.36, 0, 1.2, 0.2),
            box(0.56, -0.2, 0.17, 0.36),
            box(0.87, -0.24, 0.17, 0.44),
        ),
    ),
    "mushroom": Sprite(
        body=both(ellipse(0, 0.02, 0.96, 0.86), box(0, 0.5, 2.2, 1.0)),
        accent=union(
            polygon([(-0.22, 0.02), (0.22, 0.02), (0.3, -0.85), (-0.3, -0.85)], 0.05),
        ),
        light=union(circle(-0.4, 0.36, 0.14), circle(0.12, 0.55, 0.17), circle(0.54, 0.26, 0.12)),
        tint=(0.90, 0.85, 0.74),
    ),
    "clock": Sprite(
        body=union(
            circle(0, -0.08, 0.74),
            circle(-0.5, 0.66, 0.24),
            circle(0.5, 0.66, 0.24),
            line([(-0.4, -0.6), (-0.6, -0.92)], 0.16),
            line([(0.4, -0.6), (0.6, -0.92)], 0.16),
        ),
        light=circle(0, -0.08, 0.52),
        dark=union(line([(0, -0.08), (0, 0.26)], 0.09), line([(0, -0.08), (0.24, -0.2)], 0.09)),
    ),
}
