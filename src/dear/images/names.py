"""Which files are images, and where they lie."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from dear.errors import InputError

# What names of image files end in; HEIC needs the extra package pillow-heif.
SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .png .webp .gif .bmp .tif .tiff .ppm .pgm .avif .heic .heif".split()  # noqa: SIM905
)
_TABLES = frozenset((".csv", ".tsv", ".jsonl", ".json", ".parquet"))
# Folders that operating systems leave behind.
IGNORED = frozenset(("__macosx", "@eadir", "$recycle.bin", "system volume information"))


def is_image_name(name: str) -> bool:
    """Whether a file's name is not hidden and ends like an image's.

    >>> is_image_name("a.JPG"), is_image_name("._a.jpg"), is_image_name("notes.txt")
    (True, False, False)
    """
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def is_own_name(name: str) -> bool:
    """Whether a file or folder is the user's: not hidden, and not made by an operating system."""
    return not name.startswith(".") and name.lower() not in IGNORED


def image_paths(folder: Path) -> Iterator[str]:
    """Paths of all images below a folder, relative to it, with `/` between the parts."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if is_own_name(name)]
        inner = Path(place).relative_to(folder).as_posix()
        before = "" if inner == "." else f"{inner}/"
        yield from (before + file for file in files if is_image_name(file))


def other_paths(folder: Path) -> list[str]:
    """Paths of all files below a folder that are not images by their names, relative to it, sorted."""
    return sorted(
        (Path(place) / file).relative_to(folder).as_posix()
        for place, _, files in os.walk(folder)
        if all(map(is_own_name, Path(place).relative_to(folder).parts))
        for file in files
        if is_own_name(file) and not is_image_name(file)
    )


def find_images(names: Iterable[str]) -> list[str]:
    """Image files of a list that may hold files, folders (searched at every depth) and patterns (`*.jpg`).

    Files are kept as they are named, whether they exist or not; reading them fails if they do not.

    Raises:
        InputError: a folder without images, a pattern that nothing fits, or a table instead of images.
    """
    names = list(names)
    paths: list[str] = []
    if len(names) == 1 and Path(names[0]).suffix.lower() in _TABLES and os.path.isfile(names[0]):
        raise InputError(
            f"{names[0]}: is a table, not an image; give image files, folders, or patterns, or - to read a "
            "list of files from standard input"
        )
    for name in names:
        if os.path.isdir(name):
            inside = sorted(image_paths(Path(name)))
            if not inside:
                raise InputError(f"{name}: there is no image in this folder")
            root = Path(name)
            paths += [os.path.join(root, *path.split("/")) for path in inside]
        elif glob.has_magic(name) and not os.path.exists(name):
            fitting = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
            if not fitting:
                raise InputError(f"{name}: no file fits this pattern")
            paths += fitting
        else:
            paths.append(name)
    return paths
