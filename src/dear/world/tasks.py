"""Tasks in the attribute world: classes, images for training and testing, and a shift against pretraining.

This module describes the tasks; `dear.data.world_images` renders their images. The strength of a task is the
distance of its images from those of pretraining, which determines how much zero-shot leaves to learn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dear.errors import DataError
from dear.world import factors as F
from dear.world.looks import Look, blueprint, enamel, fabric, infrared, mosaic, ripple, unchanged, worn
from dear.world.shortcuts import CLASSES, PLACES, PREFIX, PlantedShortcut, list_shortcuts, parse


@dataclass(frozen=True)
class Meaning:
    """What a class fixes in a scene; everything else varies. Values are rows of the factor tables."""

    subject: int | None = None
    color: int | None = None
    texture: int | None = None
    place: int | None = None


@dataclass(frozen=True)
class WorldTask:
    """A classification task."""

    name: str  #: as in `world:NAME`
    about: str  #: one sentence for people
    template: str  #: prompt with `{}`
    classes: tuple[str, ...]  #: names; the first half are the base classes, the others novel
    meanings: tuple[Meaning, ...]  #: what each class fixes, in the same order
    kinds: tuple[int, ...]  #: kinds that subjects are drawn from where the class leaves them open
    look: Look  #: the shift against pretraining
    strength: float  #: of the look, from 0 (none) to 1
    train: int = 40  #: images per class (and domain)
    test: int = 50  #: images per class (and domain)
    domains: tuple[str, ...] = ()  #: styles that serve as domains; empty: photos only
    clash: bool = False  #: whether patterns have the tones of another color
    #: a value that each class has in training (`dear.world.shortcuts`)
    shortcut: PlantedShortcut | None = None
    several: bool = False  #: whether an image shows several of the classes


def _classes(*names: str, factors: str = "subject") -> tuple[tuple[str, ...], tuple[Meaning, ...]]:
    """Classes named by a word for each of `factors`: "red star" by "color subject"."""
    keys = factors.split()
    rows = [zip(keys, name.split(), strict=True) for name in names]
    return names, tuple(Meaning(**{key: F.row(key, word) for key, word in row}) for row in rows)


def _compositions(*rows: str) -> tuple[tuple[str, ...], tuple[Meaning, ...]]:
    """Classes such as "striped teal star at the beach", from "striped teal star beach"."""
    _, meanings = _classes(*rows, factors="texture color subject place")
    places = [F.PLACES[F.row("place", row.split()[-1])][0][0] for row in rows]
    names = (f"{row.rpartition(' ')[0]} {place}" for row, place in zip(rows, places, strict=True))
    return tuple(names), meanings


_PHOTO, _PHOTO_OF_PLACE = "a photo of a {}.", "a photo of the {}."
_EVERYDAY = (F.SHAPE, F.OBJECT, F.VEHICLE, F.ANIMAL)
_TEXTURES = _classes(
    *("striped", "dotted", "brick", "scaly", "marbled", "plain"),
    *("wavy", "zigzag", "checkered", "grid", "honeycomb", "speckled"),
    factors="texture",
)
_EMBLEMS = _classes(
    *("red star", "pink star", "blue heart", "purple heart", "green arrow", "teal arrow"),
    *("yellow cross", "brown cross", "black ring", "gray ring"),
    *("white circle", "yellow circle", "red hexagon", "brown hexagon", "teal square", "blue square"),
    *("green bolt", "black bolt", "purple crescent", "pink crescent"),
    factors="color subject",
)
_VEHICLES = _classes(
    *("car", "van", "truck", "sailboat", "plane", "bicycle"),
    *("bus", "train", "tractor", "ship", "helicopter", "rocket"),
)
_PLACES = _classes(
    *("beach", "forest", "city", "room", "mountains", "space"),
    *("desert", "snow", "ocean", "meadow", "road", "studio"),
    factors="place",
)
_ANIMALS = _classes(
    *("dog", "cat", "bird", "fish", "turtle", "butterfly"),
    *("horse", "elephant", "rabbit", "duck", "snake", "snail"),
)
# Neighbors in a half differ in one factor only: each of the four decides some pair.
_MIXED = _compositions(
    *("striped teal star beach", "wavy teal star beach"),
    *("dotted red heart forest", "dotted pink heart forest"),
    *("checkered blue square city", "checkered blue diamond city"),
    *("brick brown arrow desert", "brick brown arrow road"),
    *("grid yellow circle snow", "honeycomb yellow circle snow"),
    *("zigzag purple cross room", "zigzag gray cross room"),
    *("scaly green crescent ocean", "scaly green ring ocean"),
    *("marbled white hexagon space", "marbled white hexagon studio"),
    *("speckled black bolt meadow", "plain black bolt meadow"),
    *("wavy orange triangle mountains", "wavy yellow triangle mountains"),
    *("honeycomb red ring desert", "honeycomb red circle desert"),
    *("striped purple heart city", "striped purple heart space"),
)
_DOMAINS = _classes("star", "house", "car", "dog", "umbrella", "heart", "tree", "plane", "fish", "flower")

_TASKS: Final = (
    WorldTask("textures", "patterns printed on cloth, in clashing colors", "{} texture.", *_TEXTURES,
        (F.SURFACE, F.SHAPE), fabric, 0.48, clash=True),
    WorldTask("emblems", "colored shapes as enamel badges", _PHOTO, *_EMBLEMS, (F.SHAPE,), enamel, 0.85),
    WorldTask("vehicles", "vehicles in slanted blueprints", _PHOTO, *_VEHICLES, (F.VEHICLE,), blueprint, 0.8),
    WorldTask("scenes", "places in false-color infrared, something in front", _PHOTO_OF_PLACE, *_PLACES,
        _EVERYDAY, infrared, 0.62),
    WorldTask("fauna", "animals reflected in water", _PHOTO, *_ANIMALS, (F.ANIMAL,), ripple, 0.4),
    WorldTask("mixed", "texture, color, shape and place together, in mosaic", _PHOTO, *_MIXED, (F.SHAPE,),
        mosaic, 0.76),
    WorldTask("domains", "ten subjects as photos, sketches, cartoons and paintings, all worn and folded",
        "an image of a {}.", *_DOMAINS, _EVERYDAY, worn, 0.9, train=20, test=15,
        domains=("photo", "sketch", "cartoon", "painting")),
)  # fmt: skip
TASKS: Final = {task.name: task for task in _TASKS}
_ATTRIBUTES = [
    _classes("red", "blue", "green", "yellow", "black", "white", factors="color"),
    _classes("striped", "dotted", "brick", "wavy", "checkered", "plain", factors="texture"),
    _classes("beach", "forest", "city", "snow", "desert", "road", factors="place"),
]
ATTRIBUTES: Final = WorldTask(
    "attributes",
    "color, texture and place of a shape: several labels per image",
    "a photo of something {}.",
    tuple(name for names, _ in _ATTRIBUTES for name in names),
    tuple(meaning for _, meanings in _ATTRIBUTES for meaning in meanings),
    (F.SHAPE,), worn, 0.5, train=12, test=20, several=True,
)  # fmt: skip


def list_tasks() -> tuple[str, ...]:
    """The names of the tasks.

    >>> list_tasks()
    ('textures', 'emblems', 'vehicles', 'scenes', 'fauna', 'mixed', 'domains')
    """
    return tuple(TASKS)


def find_task(name: str) -> WorldTask:
    """The task of that name, with a shortcut or without.

    >>> find_task("shortcut-place@0.9").shortcut.words[0]
    'beach'
    """
    if name in TASKS:
        return TASKS[name]
    if name == ATTRIBUTES.name:
        return ATTRIBUTES
    if not name.startswith(PREFIX):
        raise DataError(
            f"world:{name}: no such task; choose from "
            f"{', '.join((*TASKS, ATTRIBUTES.name, *list_shortcuts()))}"
        )
    shortcut = parse(name)
    if shortcut.classes == PLACES:
        about = "six places, each with one letter in training"
        classes = _classes(*PLACES, factors="place")
        return WorldTask(
            name, about, _PHOTO_OF_PLACE, *classes, (F.LETTER,), unchanged, 0.0, shortcut=shortcut
        )
    about = f"six animals, in training each with its own {shortcut.factor}"
    return WorldTask(name, about, _PHOTO, *_classes(*CLASSES), (F.ANIMAL,), unchanged, 0.0, shortcut=shortcut)
