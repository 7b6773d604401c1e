"""Few-shot draws: a few pictures of each class, the same for everyone who names the same seed.

A draw depends on the data set's name, the class and the seed alone: each picture of a class is ranked by
a hash of those and its own key, and the first k are taken. So the order of files, other classes and the
machine do not matter, and fewer shots are always a part of more. Draws can be written to JSONL and read
back, so that published ones can be used.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

from dear.data.pictures import PictureSet
from dear.data.split import digest
from dear.errors import DataError, DearError
from dear.files import parse_json, read_text, write_atomic


def draw_shots(pictures: PictureSet, shots: int, seed: int) -> list[int]:
    """Indices of `shots` pictures of each class, classes in order; all of a class that has fewer.

    Raises:
        DataError: `shots` is below 1, or a class has no pictures.
    """
    if shots < 1:
        raise DataError(f"{pictures.name}: {shots} shots a class cannot be drawn; ask for at least 1")
    members: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(pictures.labels.tolist()):
        members[label].append(index)
    chosen: list[int] = []
    for label, name in enumerate(pictures.classes):
        if not members[label]:
            raise DataError(f"{pictures.name}: the class {name!r} has no pictures to draw shots from")
        rank = {
            index: (digest("shots", pictures.name, name, str(seed), pictures.key(index)), pictures.key(index))
            for index in members[label]
        }
        chosen += sorted(members[label], key=rank.__getitem__)[:shots]
    return chosen


def few_shot(pictures: PictureSet, shots: int, seed: int) -> PictureSet:
    """The set of `draw_shots`."""
    return pictures.subset(draw_shots(pictures, shots, seed))


def write_draw(path: str | os.PathLike[str], pictures: PictureSet, indices: list[int]) -> None:
    """Write a draw as JSONL: one line a picture, with its path, label and class."""
    labels = pictures.labels.tolist()
    lines = [
        json.dumps(
            {"path": pictures.key(index), "label": labels[index], "class": pictures.classes[labels[index]]},
            ensure_ascii=False,
        )
        for index in indices
    ]
    write_atomic(path, "".join(line + "\n" for line in lines))


def read_draw(path: str | os.PathLike[str], pictures: PictureSet) -> list[int]:
    """Indices of a draw that `write_draw` or anyone else wrote.

    Only `path` is needed on each line; `class` (a name), where it stands, must be the picture's own.

    Raises:
        DataError: a line is malformed, names a picture that the set does not have, or names it twice.
    """
    path = Path(path)
    try:
        text = read_text(path, "draw")
    except DearError as error:
        raise DataError(str(error)) from error
    place = {pictures.key(index): index for index in range(len(pictures))}
    labels = pictures.labels.tolist()
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
            raise DataError(f"{where}: {pictures.name} has no picture {record['path']!r} in this split")
        own = pictures.classes[labels[index]]
        if record.get("class", own) != own:
            raise DataError(
                f"{where}: the picture {record['path']!r} is of class {own!r}, not {record['class']!r}"
            )
        if index in chosen:
            raise DataError(f"{where}: the picture {record['path']!r} is drawn twice")
        chosen[index] = None
    if not chosen:
        raise DataError(f"{path}: the draw is empty")
    return list(chosen)
