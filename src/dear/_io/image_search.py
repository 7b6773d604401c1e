"""Image files on the disk: below a folder, by a pattern, by name; without PyTorch."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from dear._io.image_file import is_image_name
from dear.errors import InputError

IGNORED = frozenset(("__macosx", "@eadir", "$recycle.bin", "system volume information"))


def is_own_name(name: str) -> bool:
    """Whether a file or folder is a person's own: neither hidden nor left behind by an operating system."""
    return not name.startswith(".") and name.lower() not in IGNORED


def image_paths(folder: Path) -> Iterator[str]:
    """Every image below a folder, relative to it, with `/`."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if is_own_name(name)]
        inner = Path(place).relative_to(folder)
        for file in files:
            if is_image_name(file):
                yield (inner / file).as_posix()


def find_images(names: Iterable[str]) -> list[str]:
    """Image files of a list that may hold files, folders (searched at every depth) and patterns (`*.jpg`).

    Files are kept as they are named, whether they exist or not: reading them tells.

    Raises:
        InputError: a folder without images, or a pattern that nothing fits.
    """
    found: list[str] = []
    for name in names:
        if os.path.isdir(name):
            inside = sorted(image_paths(Path(name)))
            if not inside:
                raise InputError(f"{name}: there is no image in this folder")
            found += [str(Path(name) / path) for path in inside]
        elif glob.has_magic(name) and not os.path.exists(name):
            fitting = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
            if not fitting:
                raise InputError(f"{name}: no file fits this pattern")
            found += fitting
        else:
            found.append(name)
    return found
