"""Few-shot draws: a few images of each class, the same for everyone who names the same seed.

A draw depends on the dataset's name, the class and the seed alone: each image of a class is ranked by
a hash of those and its own key, and the first k are taken. So the order of files, other classes and the
machine do not matter, and fewer shots are always a part of more. Draws that others published are read from
JSONL files.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from dear._io.files import read_text
from dear._io.strict_json import parse_json
from dear.data.images import ImageSet
from dear.data.split import digest
from dear.errors import DataError, DearError


def draw_shots(images: ImageSet, shots: int, seed: int) -> list[int]:
    """Indices of `shots` images of each class, classes in order; all of a class that has fewer.

    Raises:
        DataError: `shots` is below 1, or a class has no images.
    """
    if shots < 1:
        raise DataError(f"{images.name}: {shots} shots per class cannot be drawn; ask for at least 1")
    members: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(images.labels.tolist()):
        members[label].append(index)
    chosen: list[int] = []
    for label, name in enumerate(images.classes):
        if not members[label]:
            raise DataError(f"{images.name}: the class {name!r} has no images to draw shots from")
        rank = {
            index: (digest("shots", images.name, name, str(seed), images.key(index)), images.key(index))
            for index in members[label]
        }
        chosen += sorted(members[label], key=rank.__getitem__)[:shots]
    return chosen


def few_shot(images: ImageSet, shots: int, seed: int) -> ImageSet:
    """The set of `draw_shots`."""
    return images.subset(draw_shots(images, shots, seed))


def read_draw(path: str | os.PathLike[str], images: ImageSet) -> list[int]:
    """Indices of a draw from a JSONL file: one object with a `path` per line.

    Where a line also has a `class` (a name), it must be the image's own.

    Raises:
        DataError: a line is malformed, names an image that the set does not have, or names it twice.
    """
    path = Path(path)
    try:
        text = read_text(path, "draw")
    except DearError as error:
        raise DataError(str(error)) from error
    place = {images.key(index): index for index in range(len(images))}
    labels = images.labels.tolist()
    chosen: dict[int, None] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = parse_json(line, where, "line of a draw")
        except DearError as error:
            raise DataError(str(error)) from error
        if not isinstance(record, dict) or not isinstance(record.get("path"), str):
            raise DataError(f"{where}: is not an object with a path")
        index = place.get(record["path"])
        if index is None:
            raise DataError(f"{where}: {images.name} has no image {record['path']!r} in this split")
        own = images.classes[labels[index]]
        if record.get("class", own) != own:
            raise DataError(
                f"{where}: the image {record['path']!r} is of class {own!r}, not {record['class']!r}"
            )
        if index in chosen:
            raise DataError(f"{where}: the image {record['path']!r} is drawn twice")
        chosen[index] = None
    if not chosen:
        raise DataError(f"{path}: the draw is empty")
    return list(chosen)
