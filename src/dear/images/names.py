"""Which files are images, and how they are found."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from dear.errors import InputError

# Endings of image files; HEIC needs the extra package pillow-heif.
SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .png .webp .gif .bmp .tif .tiff .ppm .pgm .avif .heic .heif".split()  # noqa: SIM905
)
_TABLES = frozenset((".csv", ".tsv", ".jsonl", ".json", ".parquet"))
# Folders that operating systems create.
IGNORED = frozenset(("__macosx", "@eadir", "$recycle.bin", "system volume information"))


def is_image_name(name: str) -> bool:
    """Whether a file is not hidden and has the ending of an image.

    >>> is_image_name("a.JPG"), is_image_name("._a.jpg"), is_image_name("notes.txt")
    (True, False, False)
    """
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def is_user_file(name: str) -> bool:
    """Whether a file or folder is the user's: not hidden, and not made by an operating system."""
    return not name.startswith(".") and name.lower() not in IGNORED


def image_paths(folder: Path) -> Iterator[str]:
    """Paths of all images below a folder, relative to it, with `/` between the parts."""
    for directory, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if is_user_file(name)]
        inner = Path(directory).relative_to(folder).as_posix()
        prefix = "" if inner == "." else f"{inner}/"
        yield from (prefix + file for file in files if is_image_name(file))


def other_paths(folder: Path) -> list[str]:
    """Paths of all files below a folder that are not images by their names, relative to it, sorted."""
    return sorted(
        (Path(directory) / file).relative_to(folder).as_posix()
        for directory, _, files in os.walk(folder)
        if all(map(is_user_file, Path(directory).relative_to(folder).parts))
        for file in files
        if is_user_file(file) and not is_image_name(file)
    )


def find_images(names: Iterable[str]) -> list[str]:
    """Image files of a list of files, folders (searched at every depth) and patterns (`*.jpg`).

    Names of files are returned unchanged (`~` is expanded), even if there is no such file; reading it then
    fails.

    Raises:
        InputError: a folder without images, a pattern without matches, or a table instead of images.
    """
    names = [os.path.expanduser(name) for name in names]
    paths: list[str] = []
    if len(names) == 1 and Path(names[0]).suffix.lower() in _TABLES and os.path.isfile(names[0]):
        raise InputError(
            f"{names[0]}: is a table, not an image; give image files, folders, or patterns, or - to read a "
            "list of files from standard input"
        )
    for name in names:
        if os.path.isdir(name):
            images = sorted(image_paths(Path(name)))
            if not images:
                raise InputError(f"{name}: this folder contains no images")
            root = Path(name)
            paths += [os.path.join(root, *path.split("/")) for path in images]
        elif glob.has_magic(name) and not os.path.exists(name):
            matches = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
            if not matches:
                raise InputError(f"{name}: no file matches this pattern")
            paths += matches
        else:
            paths.append(name)
    return paths
