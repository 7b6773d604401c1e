"""Tasks with a planted shortcut: one value per class in training, all values in the test.

`shortcut-place` shows each animal at one place, `shortcut-color` and `shortcut-texture` in one color or
pattern. The classes of `shortcut-text` are places: each shows one letter in training, and mostly a wrong one
in the test. `shortcut-attack` pastes letters next to the animals; there a letter hides the
animal from a small backbone instead of being learned, so that no removal helps. `@0.95` after the name says
which share of a class's training images shows that value; the others are spread evenly over the other values.
`shortcut-none` is the control: animals, places balanced in training, too. The test split has as many images
of each class with each value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from dear.errors import DataError
from dear.world import factors as F

CLASSES: Final = ("dog", "cat", "bird", "fish", "turtle", "butterfly")
PLACES: Final = ("beach", "forest", "snow", "city", "space", "desert")
PREFIX: Final = "shortcut-"
TRAIN, TEST = 40, 20  # images per class, and per class and value
_NAME = re.compile(r"shortcut-(?P<kind>[a-z]+)(?:@(?P<share>[0-9]+(?:\.[0-9]+)?))?")


@dataclass(frozen=True)
class PlantedShortcut:
    """A value that the training images of a class share."""

    factor: str  #: "place", "color", "texture", "subject" (a letter) or "letter" (pasted next to the subject)
    concept: str  #: the concept that names the factor's values, one of the twelve
    #: rows of the factor's table, one per class: its value in training
    values: tuple[int, ...]
    words: tuple[str, ...]  #: the values' names
    correlation: float = 1.0  #: share of a class's training images that show the value of the class
    classes: tuple[str, ...] = CLASSES  #: six animals, or six places

    def train_values(self, label: int) -> list[int]:
        """Indices into `values`, one per training image of a class.

        >>> parse("shortcut-place@0.95").train_values(2).count(2)
        38
        """
        kinds = len(self.values)
        aligned = round(self.correlation * TRAIN)
        others = [(label + 1 + number % (kinds - 1)) % kinds for number in range(TRAIN - aligned)]
        return [label] * aligned + others


def _shortcut(factor: str, concept: str, *words: str) -> PlantedShortcut:
    table = "subject" if factor == "letter" else factor
    return PlantedShortcut(factor, concept, tuple(F.row(table, word) for word in words), words)


_PLACE = _shortcut("place", "Location", *PLACES)
_LETTERS = ("a", "e", "h", "o", "s", "x")
KINDS: Final[dict[str, PlantedShortcut]] = {
    "place": _PLACE,
    "color": _shortcut("color", "Color", "red", "yellow", "green", "blue", "purple", "black"),
    "texture": _shortcut("texture", "Texture", "striped", "dotted", "checkered", "zigzag", "brick", "scaly"),
    "text": replace(_shortcut("subject", "Text", *_LETTERS), classes=PLACES),
    "attack": _shortcut("letter", "Text", *_LETTERS),
    "none": replace(_PLACE, correlation=1 / len(CLASSES)),
}


def list_shortcuts() -> tuple[str, ...]:
    """The names of the tasks with a shortcut, and of the control.

    >>> list_shortcuts()[:4]
    ('shortcut-place', 'shortcut-color', 'shortcut-texture', 'shortcut-text')
    """
    return tuple(PREFIX + kind for kind in KINDS)


def parse(name: str) -> PlantedShortcut:
    """The shortcut of a task's name.

    >>> parse("shortcut-color@0.9").correlation, parse("shortcut-color").correlation
    (0.9, 1.0)
    """
    match = _NAME.fullmatch(name)
    if match is None or match["kind"] not in KINDS:
        raise DataError(
            f"world:{name}: no such task; choose from {', '.join(list_shortcuts())}, all but the last with "
            "the share of training images that show it after an @ (shortcut-place@0.95)"
        )
    shortcut = KINDS[match["kind"]]
    if match["share"] is None:
        return shortcut
    if match["kind"] == "none":
        raise DataError(f"world:{name}: the control has no shortcut; remove the share after the @")
    share = float(match["share"])
    if not 1 / len(CLASSES) <= share <= 1:
        raise DataError(
            f"world:{name}: the share after the @ must be from {1 / len(CLASSES):.2f} (no shortcut) to 1, "
            f"got {share:g}"
        )
    return replace(shortcut, correlation=share)
