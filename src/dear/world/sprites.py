"""The drawings of the world's subjects, composed of the parts in `sdf`.

`sprites.json` contains them: a layer is a list of parts; a part is the name of a function of `sdf` with its
arguments. A person has a spine (head, neck, hip), arms and legs. Letters and digits are strokes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dear.utils.files import read_json
from dear.world import factors as F
from dear.world import sdf
from dear.world.sdf import Part, Point, arc_points, box, circle, intersection, line, union

RGB = tuple[float, float, float]
_SKIN = (0.87, 0.67, 0.52)


@dataclass(frozen=True)
class Sprite:
    """A subject's drawing: up to four layers, painted in this order."""

    body: Part | None = None  #: takes the scene's color and texture
    accent: Part | None = None  #: painted over the body in the sprite's own `tint`
    light: Part | None = None  #: painted near white (windows, eyes)
    dark: Part | None = None  #: painted near black (wheels, pupils, strokes)
    tint: RGB = (0.45, 0.38, 0.33)  #: the accent's color


def sprites() -> tuple[Sprite, ...]:
    """The sprite of every subject in the order of `factors.SUBJECT_NAMES`."""
    rows = read_json(Path(__file__).with_name("sprites.json"), "sprites")
    by_name = {name: _person(**row) if "spine" in row else _layered_sprite(row) for name, row in rows.items()}
    by_name |= {
        sign: Sprite(union(*(line(points, 0.34) for points in lines))) for sign, lines in STROKES.items()
    }
    surface = Sprite(body=lambda x, y: torch.full_like(x, -1.0))
    return (*(by_name[name] for name in F.SUBJECT_NAMES[:-2]), surface, Sprite())


def _layered_sprite(row: dict[str, Any]) -> Sprite:
    layers = {name: union(*map(_evaluate, parts)) for name, parts in row.items() if name != "tint"}
    return Sprite(**layers, tint=row.get("tint", Sprite.tint))


def _evaluate(value: Any) -> Any:
    """A part, points or a number; points that a function returns are appended to the surrounding list."""
    if not isinstance(value, list):
        return value
    if isinstance(value[0], str):
        return getattr(sdf, value[0])(*map(_evaluate, value[1:]))
    parts: list[Any] = []
    for item in value:
        called = isinstance(item, list) and isinstance(item[0], str)
        parts += _evaluate(item) if called else [_evaluate(item)]
    return parts


def _person(spine: list[Point], arms: list[list[Point]], legs: list[list[Point]]) -> Sprite:
    """A person: clothes in the scene's color, dark trousers and hair."""
    (x, y), neck, hip = spine
    hair = intersection(circle(x, y + 0.03, 0.23), box(x, y + 0.24, 0.6, 0.36))
    return Sprite(
        body=union(line([neck, hip], 0.38), *(line(points, 0.16) for points in arms)),
        accent=union(circle(x, y, 0.21), *(circle(*points[-1], 0.1) for points in arms)),
        dark=union(hair, *(line(points, 0.19) for points in legs)),
        tint=_SKIN,
    )


_T, _M, _B = 0.82, 0.0, -0.82  # top, middle, base
_L, _R, _C = -0.56, 0.56, 0.0
_arc = partial(arc_points, steps=16)


def _bowl(top: float, base: float, reach: float = _R) -> list[Point]:
    """The round side of B, D, P, R: from the stem's top around to its base."""
    middle, radius = (top + base) / 2, (top - base) / 2
    start = reach - min(radius, reach - _L)
    return [(_L, top), (start, top), *_arc(start, middle, reach - start, radius, 90, -90), (_L, base)]


STROKES: dict[str, list[list[Point]]] = {
    "a": [[(-0.64, _B), (_C, _T), (0.64, _B)], [(-0.4, -0.26), (0.4, -0.26)]],
    "b": [[(_L, _T), (_L, _B)], _bowl(_T, 0.04, 0.44), _bowl(0.04, _B, 0.54)],
    "c": [_arc(0.04, 0, 0.6, 0.82, 48, 312)],
    "d": [[(_L, _T), (_L, _B)], _bowl(_T, _B, 0.58)],
    "e": [[(0.5, _T), (_L, _T), (_L, _B), (0.5, _B)], [(_L, _M), (0.36, _M)]],
    "f": [[(0.52, _T), (_L, _T), (_L, _B)], [(_L, 0.02), (0.36, 0.02)]],
    "g": [[*_arc(0.02, 0, 0.6, 0.82, 48, 330), (0.56, -0.08), (0.14, -0.08)]],
    "h": [[(_L, _T), (_L, _B)], [(_R, _T), (_R, _B)], [(_L, _M), (_R, _M)]],
    "i": [[(_C, _T), (_C, _B)], [(-0.34, _T), (0.34, _T)], [(-0.34, _B), (0.34, _B)]],
    "j": [[(0.36, _T), (0.36, -0.4), *_arc(-0.06, -0.4, 0.42, 0.42, 0, -165)]],
    "k": [[(_L, _T), (_L, _B)], [(0.54, _T), (_L, -0.1)], [(-0.16, 0.16), (0.58, _B)]],
    "l": [[(-0.42, _T), (-0.42, _B), (0.54, _B)]],
    "m": [[(-0.7, _B), (-0.66, _T), (0, -0.2), (0.66, _T), (0.7, _B)]],
    "n": [[(_L, _B), (_L, _T), (_R, _B), (_R, _T)]],
    "o": [_arc(0, 0, 0.62, 0.82, 0, 360)],
    "p": [[(_L, _T), (_L, _B)], _bowl(_T, -0.1, 0.5)],
    "q": [_arc(0, 0.04, 0.6, 0.78, 0, 360), [(0.16, -0.4), (0.62, -0.9)]],
    "r": [[(_L, _T), (_L, _B)], _bowl(_T, 0.0, 0.48), [(-0.06, 0.0), (0.54, _B)]],
    "s": [[*_arc(0, 0.41, 0.52, 0.41, 25, 270), *_arc(0, -0.41, 0.54, 0.41, 90, -155)]],
    "t": [[(-0.62, _T), (0.62, _T)], [(_C, _T), (_C, _B)]],
    "u": [[(_L, _T), (_L, -0.26), *_arc(0, -0.26, 0.56, 0.56, 180, 360), (_R, _T)]],
    "v": [[(-0.6, _T), (_C, _B), (0.6, _T)]],
    "w": [[(-0.8, _T), (-0.44, _B), (0, 0.3), (0.44, _B), (0.8, _T)]],
    "x": [[(-0.56, _T), (0.56, _B)], [(0.56, _T), (-0.56, _B)]],
    "y": [[(-0.58, _T), (_C, 0.0), (0.58, _T)], [(_C, 0.0), (_C, _B)]],
    "z": [[(-0.54, _T), (0.54, _T), (-0.54, _B), (0.56, _B)]],
    "0": [_arc(0, 0, 0.5, 0.82, 0, 360), [(-0.22, -0.36), (0.22, 0.36)]],
    "1": [[(-0.34, 0.46), (0.04, _T), (0.04, _B)], [(-0.34, _B), (0.42, _B)]],
    "2": [[*_arc(0, 0.36, 0.5, 0.46, 165, -30), (-0.52, _B), (0.54, _B)]],
    "3": [[*_arc(-0.04, 0.42, 0.5, 0.4, 150, -80)], [*_arc(-0.04, -0.4, 0.56, 0.42, 85, -150)]],
    "4": [[(0.26, _B), (0.26, _T), (-0.58, -0.3), (0.6, -0.3)]],
    "5": [[(0.48, _T), (-0.42, _T), (-0.48, 0.1), *_arc(-0.06, -0.28, 0.58, 0.52, 125, -150)]],
    "6": [_arc(0, -0.32, 0.52, 0.5, 0, 360), [(-0.5, -0.24), (-0.3, 0.36), (0.24, 0.86)]],
    "7": [[(-0.52, _T), (0.52, _T), (-0.14, _B)]],
    "8": [_arc(0, 0.42, 0.42, 0.4, 0, 360), _arc(0, -0.4, 0.52, 0.42, 0, 360)],
    "9": [_arc(0, 0.32, 0.52, 0.5, 0, 360), [(0.5, 0.24), (0.3, -0.36), (-0.24, -0.86)]],
}
