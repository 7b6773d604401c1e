"""People in actions, and faces with emotions."""

from __future__ import annotations

from dear.world.sdf import Part, Point, arc, both, box, circle, ellipse, line, minus, union
from dear.world.sprites.base import Sprite

_SKIN = (0.87, 0.67, 0.52)
_MOUTH = (0.62, 0.14, 0.20)


def _figure(
    head: Point, neck: Point, hip: Point, arms: tuple[list[Point], ...], legs: tuple[list[Point], ...]
) -> Sprite:
    """A person: clothes in the scene's color, dark trousers and hair."""
    ends = [circle(points[-1][0], points[-1][1], 0.1) for points in arms]
    x, y = head
    hair: Part = both(circle(x, y + 0.03, 0.23), box(x, y + 0.24, 0.6, 0.36))
    return Sprite(
        body=union(line([neck, hip], 0.38), *(line(points, 0.16) for points in arms)),
        accent=union(circle(x, y, 0.21), *ends),
        dark=union(hair, *(line(points, 0.19) for points in legs)),
        tint=_SKIN,
    )


PEOPLE: dict[str, Sprite] = {
    "standing": _figure(
        (0, 0.76),
        (0, 0.36),
        (0, -0.06),
        ([(-0.18, 0.4), (-0.34, 0.06), (-0.34, -0.16)], [(0.18, 0.4), (0.34, 0.06), (0.34, -0.16)]),
        ([(-0.1, -0.16), (-0.13, -0.94)], [(0.1, -0.16), (0.13, -0.94)]),
    ),
    "running": _figure(
        (0.3, 0.72),
        (0.16, 0.34),
        (-0.04, -0.04),
        ([(0.1, 0.38), (-0.3, 0.22), (-0.46, -0.06)], [(0.2, 0.36), (0.46, 0.1), (0.74, 0.28)]),
        ([(0.0, -0.14), (0.42, -0.3), (0.34, -0.84)], [(-0.1, -0.12), (-0.34, -0.52), (-0.82, -0.5)]),
    ),
    "jumping": _figure(
        (0, 0.62),
        (0, 0.24),
        (0, -0.12),
        ([(-0.14, 0.3), (-0.46, 0.54), (-0.6, 0.94)], [(0.14, 0.3), (0.46, 0.54), (0.6, 0.94)]),
        ([(-0.1, -0.2), (-0.52, -0.34), (-0.6, -0.76)], [(0.1, -0.2), (0.52, -0.34), (0.6, -0.76)]),
    ),
    "sitting": _figure(
        (-0.2, 0.66),
        (-0.22, 0.26),
        (-0.22, -0.22),
        ([(-0.14, 0.26), (0.06, -0.1), (0.36, -0.08)],),
        ([(-0.2, -0.34), (0.42, -0.34), (0.42, -0.9)], [(-0.5, -0.52), (0.1, -0.52)]),
    ),
    "waving": _figure(
        (0, 0.62),
        (0, 0.24),
        (0, -0.14),
        ([(-0.18, 0.28), (-0.34, -0.02), (-0.32, -0.26)], [(0.16, 0.28), (0.52, 0.36), (0.6, 0.86)]),
        ([(-0.1, -0.24), (-0.13, -0.96)], [(0.1, -0.24), (0.13, -0.96)]),
    ),
    "dancing": _figure(
        (0.08, 0.7),
        (0.04, 0.32),
        (-0.06, -0.06),
        ([(-0.1, 0.36), (-0.5, 0.36), (-0.62, 0.72)], [(0.16, 0.36), (0.5, 0.22), (0.78, -0.04)]),
        ([(-0.08, -0.14), (-0.1, -0.94)], [(0.02, -0.14), (0.5, -0.34), (0.1, -0.58)]),
    ),
}

_HEAD = circle(0, 0, 0.94)


def _eyes(radius: float, height: float = 0.24) -> Part:
    return union(ellipse(-0.34, height, radius, radius * 1.3), ellipse(0.34, height, radius, radius * 1.3))


FACES: dict[str, Sprite] = {
    "happy": Sprite(
        body=_HEAD,
        accent=both(circle(0, -0.12, 0.56), box(0, -0.48, 1.4, 0.6)),
        light=box(0, -0.23, 0.8, 0.11),
        dark=_eyes(0.12),
        tint=_MOUTH,
    ),
    "sad": Sprite(
        body=_HEAD,
        light=ellipse(-0.42, -0.12, 0.09, 0.17),
        dark=union(
            _eyes(0.11, 0.2),
            arc(0, -0.74, 0.44, 0.36, 25, 155, 0.12),
            line([(-0.58, 0.4), (-0.2, 0.58)], 0.1),
            line([(0.58, 0.4), (0.2, 0.58)], 0.1),
        ),
    ),
    "angry": Sprite(
        body=_HEAD,
        accent=box(0, -0.46, 0.84, 0.26, 0.08),
        light=union(*(box(x, -0.46, 0.12, 0.18) for x in (-0.28, -0.1, 0.1, 0.28))),
        dark=union(
            _eyes(0.11, 0.12),
            line([(-0.66, 0.56), (-0.14, 0.28)], 0.16),
            line([(0.66, 0.56), (0.14, 0.28)], 0.16),
        ),
        tint=_MOUTH,
    ),
    "surprised": Sprite(
        body=_HEAD,
        accent=ellipse(0, -0.46, 0.25, 0.34),
        light=_eyes(0.23, 0.26),
        dark=union(
            _eyes(0.1, 0.26),
            arc(-0.36, 0.52, 0.24, 0.16, 20, 160, 0.08),
            arc(0.36, 0.52, 0.24, 0.16, 20, 160, 0.08),
        ),
        tint=_MOUTH,
    ),
    "sleepy": Sprite(
        body=_HEAD,
        accent=minus(ellipse(0.0, -0.46, 0.17, 0.12), circle(9, 9, 1)),
        dark=union(
            arc(-0.36, 0.22, 0.24, 0.16, 190, 350, 0.11),
            arc(0.36, 0.22, 0.24, 0.16, 190, 350, 0.11),
        ),
        light=union(
            line([(0.5, 0.98), (0.76, 0.98), (0.5, 0.7), (0.76, 0.7)], 0.08),
            line([(0.8, 0.62), (0.98, 0.62), (0.8, 0.42), (0.98, 0.42)], 0.07),
        ),
        tint=_MOUTH,
    ),
    "calm": Sprite(body=_HEAD, dark=union(_eyes(0.12), line([(-0.34, -0.42), (0.34, -0.42)], 0.12))),
}
