"""Reproducible splits and few-shot draws, which depend on names and copies, not on the order of files.

Images are ordered by a hash of their keys. If data has no splits, the first fifth of each class is held out.
A draw depends on the dataset's name, the class and the seed: the first k of a class are used, so other
classes and the machine do not matter, and fewer shots are a subset of more. Published draws are read from
JSONL files.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TypeVar

from dear.data.content import content_digest
from dear.data.duplicates import MAX_IMAGES, IntArray, find_file_duplicates
from dear.data.images import FileImages, ImageSet, ListedImages, targets_of
from dear.data.paths import read_list
from dear.errors import DataError, DearError
from dear.utils.digest import of_parts
from dear.utils.notices import note
from dear.utils.schema import parse_json

HELD_OUT = 0.2
Item = TypeVar("Item")


def hash_words(*parts: str) -> bytes:
    """A hash of some words: the same on every machine and in every version.

    Composed and decomposed accents have the same hash, because file systems convert between them.

    >>> hash_words("a", "b") == hash_words("ab")
    False
    """
    joined = "\0".join(unicodedata.normalize("NFC", part).replace("\0", "\0\0") for part in parts)
    return of_parts(joined)


def hold_out(
    keys: Sequence[str],
    groups: Sequence[Hashable],
    share: float = HELD_OUT,
    units: Sequence[int] | IntArray | None = None,
) -> list[bool]:
    """Whether each image is held out for testing, for data without splits.

    In each group (a class; a class of a domain) the images are ordered by the hash of their key, and the
    first `share` of them, rounded, is held out: at least one and not all where there are two or more; a
    single image is for training. Images of one unit are copies of each other and stay together, for
    training if they belong to several groups or are all of their group. A unit that would make the
    held-out part much too large is skipped.

    >>> sum(hold_out([f"cat/{n}.jpg" for n in range(10)], ["cat"] * 10))
    2
    >>> hold_out(["a", "a copy", "b", "b copy"], ["cat"] * 4, units=[0, 0, 1, 1])
    [False, False, True, True]
    """
    order = sorted(range(len(keys)), key=lambda index: (hash_words("hold out", keys[index]), keys[index]))
    units = range(len(keys)) if units is None else units
    members: dict[int, list[int]] = defaultdict(list)
    sizes: Counter[Hashable] = Counter(groups)
    for index in order:
        members[int(units[index])].append(index)
    parts: dict[Hashable, list[list[int]]] = defaultdict(list)  # units that belong to one group
    for unit in members.values():
        group = groups[unit[0]]
        if all(groups[index] == group for index in unit):
            parts[group].append(unit)
    held_out = [False] * len(keys)
    for group, class_units in parts.items():
        if sizes[group] < 2 or len(class_units[0]) == sizes[group]:
            continue
        count, chosen = min(max(round(share * sizes[group]), 1), sizes[group] - 1), 0
        for unit in class_units:
            if chosen < count and chosen + len(unit) - count <= count - chosen:
                chosen += len(unit)
                for index in unit:
                    held_out[index] = True
        if not chosen:  # every unit is large
            for index in min(class_units, key=len):
                held_out[index] = True
    return held_out


def pick_split(
    keys: Sequence[str], groups: Sequence[Hashable], split: str, where: str, root: Path | None = None
) -> list[int]:
    """Indices of a split of data without splits: "train", "test" (held out), or "all".

    If keys are paths of image files below `root`, an image and its copies stay together. Benchmarks have no
    `root`: their splits are those of other papers.
    """
    if split == "all":
        return list(range(len(keys)))
    if split not in ("train", "test"):
        raise DataError(
            f"{where}: the data names no splits, so split must be one of train, test and all, got {split!r}"
        )
    copies = None if root is None else find_file_duplicates([root / key for key in keys])
    held_out = hold_out(keys, groups, units=None if copies is None else copies.units)
    sentence = "" if copies is None else copies.sentence(keys.__getitem__)
    unsearched = copies is not None and not copies.searched
    note(
        f"{where}: names no split, so about a fifth of each class is held out for testing: "
        f"{held_out.count(False)} images to train on, {held_out.count(True)} to test on"
        + (f"; {sentence}, and copies stay on one side" if sentence else "")
        + (f"; near duplicates are searched in at most {MAX_IMAGES:,} images" if unsearched else "")
    )
    return [index for index in range(len(keys)) if held_out[index] == (split == "test")]


def halves(items: Sequence[Item]) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Base and novel: the first half of the classes, rounded up, and the rest.

    >>> halves(["a", "b", "c"])
    (('a', 'b'), ('c',))
    """
    middle = (len(items) + 1) // 2
    return tuple(items[:middle]), tuple(items[middle:])


def draw_shots(images: ImageSet, shots: int, seed: int) -> list[int]:
    """Indices of `shots` images of each class, in the order of classes; all images of a class that has fewer.

    Files with equal content are drawn only if a class has too few others.
    """
    if shots < 1:
        raise DataError(f"{images.name}: shots must be at least 1 per class, got {shots}")
    members: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(images.labels.tolist()):
        members[label].append(index)
    chosen: list[int] = []
    for label, name in enumerate(images.classes):
        if not members[label] and targets_of(images) is not None:
            continue  # all its images also show a rarer class, for which they are drawn
        if not members[label]:
            raise DataError(f"{images.name}: the class {name!r} has no images to draw shots from")
        rank = {
            index: (hash_words("shots", images.name, name, str(seed), images.key(index)), images.key(index))
            for index in members[label]
        }
        chosen += _distinct_first(images, sorted(members[label], key=rank.__getitem__), shots)
    return chosen


def _distinct_first(images: ImageSet, order: Sequence[int], count: int) -> list[int]:
    """The first `count` of some images, where copies of earlier ones come last."""
    if len(order) <= count or not isinstance(images, FileImages | ListedImages):
        return list(order[:count])
    contents: dict[bytes, int] = {}
    copies: list[int] = []
    for index in order:
        if contents.setdefault(content_digest(images, index), index) != index:
            copies.append(index)
        if len(contents) == count:
            break
    return [*contents.values(), *copies][:count]


def few_shot(images: ImageSet, shots: int, seed: int) -> ImageSet:
    """The set of `draw_shots`."""
    return images.subset(draw_shots(images, shots, seed))


def read_draw(path: str | os.PathLike[str], images: ImageSet) -> list[int]:
    """Indices of a draw from a JSONL file: one object with a `path` per line.

    If a line has a `class` (a name), it must be that of the image.
    """
    text = read_list(Path(path), "draw")
    index_of = {images.key(index): index for index in range(len(images))}
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
            raise DataError(f"{where}: must be an object with a path")
        index = index_of.get(record["path"])
        if index is None:
            raise DataError(f"{where}: {images.name} has no image {record['path']!r} in this split")
        class_name = images.classes[labels[index]]
        if record.get("class", class_name) != class_name:
            raise DataError(
                f"{where}: the image {record['path']!r} is of class {class_name!r}, not {record['class']!r}"
            )
        if index in chosen:
            raise DataError(f"{where}: the image {record['path']!r} is drawn twice")
        chosen[index] = None
    if not chosen:
        raise DataError(f"{path}: a draw must name at least one image, got none")
    return list(chosen)
