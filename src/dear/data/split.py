"""Reproducible splits: they depend on names alone, never on the order of files."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TypeVar

from dear._io.notes import note
from dear.errors import DataError

HELD_OUT = 0.2
Thing = TypeVar("Thing")


def digest(*parts: str) -> bytes:
    """A hash of some words: the same on every machine and in every version.

    Composed and decomposed accents count as the same, because file systems change one into the other.

    >>> digest("a", "b") == digest("ab")
    False
    """
    joined = "\0".join(unicodedata.normalize("NFC", part).replace("\0", "\0\0") for part in parts)
    return hashlib.sha256(joined.encode("utf-8", "surrogatepass")).digest()


def hold_out(keys: Sequence[str], groups: Sequence[Hashable], share: float = HELD_OUT) -> list[bool]:
    """Which images are held out for testing where the data names no split.

    In each group (a class; a class of a domain) the images are ordered by the hash of their key, and the
    first `share` of them, rounded, is held out: at least one and not all where there are two or more; a
    single image is for training.

    >>> sum(hold_out([f"cat/{n}.jpg" for n in range(10)], ["cat"] * 10))
    2
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    held = [False] * len(keys)
    for indices in members.values():
        indices.sort(key=lambda index: (digest("hold out", keys[index]), keys[index]))
        count = min(max(round(share * len(indices)), 1), len(indices) - 1)
        for index in indices[:count]:
            held[index] = True
    return held


def pick_split(keys: Sequence[str], groups: Sequence[Hashable], split: str, where: str) -> list[int]:
    """Indices of a split of data that names none: "train", "test" (held out), or "all".

    Raises:
        DataError: another split is asked for.
    """
    if split == "all":
        return list(range(len(keys)))
    if split not in ("train", "test"):
        raise DataError(f"{where}: names no splits, so there are only train, test and all, not {split!r}")
    held = hold_out(keys, groups)
    note(
        f"{where}: names no split, so about a fifth of each class is held out for testing: "
        f"{held.count(False)} images to train on, {held.count(True)} to test on"
    )
    return [index for index in range(len(keys)) if held[index] == (split == "test")]


def halves(items: Sequence[Thing]) -> tuple[tuple[Thing, ...], tuple[Thing, ...]]:
    """Base and novel: the first half of the classes, rounded up, and the rest.

    >>> halves(["a", "b", "c"])
    (('a', 'b'), ('c',))
    """
    middle = (len(items) + 1) // 2
    return tuple(items[:middle]), tuple(items[middle:])
