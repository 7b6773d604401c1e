"""A folder of class folders, with or without `train/` and `test/` above them.

```
photos/golden_retriever/1.jpg        photos/train/golden_retriever/1.jpg
photos/tabby_cat/2.jpg               photos/test/golden_retriever/2.jpg
```

A class is a folder; images at any depth below it are its own. Classes are in natural order of their folder
names. Hidden files, links to folders inside a class, and files that do not end like images are passed
over. Where there are no split folders, a fifth of each class is held out for testing by the hash of the
path (`dear.data.split`); but `photos/train` or `photos/test`, given by itself, is taken whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from dear._io.image_file import is_image_name
from dear.data.images import FileImages
from dear.data.names import TEMPLATE, check_classes, check_template, natural_key, readable
from dear.data.split import pick_split
from dear.errors import DataError, InputError

# What folders may be called, by the split they hold.
SPLITS = {"train": ("train", "training"), "test": ("test", "testing"), "val": ("val", "valid", "validation")}


def open_folder(
    root: str | os.PathLike[str],
    split: str,
    template: str | None = None,
    name: str | None = None,
    allow_empty: bool = False,
) -> FileImages:
    """Read a folder of class folders.

    Args:
        root: the folder.
        split: "train", "test", "val", or "all". Where there is a `val/` but no `test/`, that is tested on.
        template: prompt with `{}` (default "a photo of a {}.").
        name: of the dataset (default: the folder's name).
        allow_empty: accept class folders without images.

    Returns:
        The images of the split. All splits have the same classes: those of all split folders together.

    Raises:
        DataError: no such folder or split, no classes, a class without images, or two that read the same.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root}: is not a folder")
    whole = _is_split(root.resolve())
    name = name or (root.resolve().parent if whole else root.resolve()).name
    groups = _split_folders(root)
    found = {key: _classes(folder) for key, folder in (groups or {"": root}).items()}
    folders = sorted({folder for classes in found.values() for folder in classes}, key=natural_key)
    if not folders:
        raise DataError(
            f"{root}: holds no class folders; put the images of each class in a folder of its name"
        )
    try:
        classes = check_classes(folders, [readable(folder) for folder in folders], str(root))
    except InputError as error:
        raise DataError(f"{root}: {error}") from error
    if not allow_empty:
        _refuse_empty(root, groups, found)

    parts = [""] if not groups else _wanted(root, groups, split)
    number = {folder: label for label, folder in enumerate(folders)}
    rows = [
        ("/".join((groups[part].name, path) if groups else (path,)), number[folder])
        for part in parts
        for folder, paths in found[part].items()
        for path in paths
    ]
    rows.sort(key=lambda row: (row[1], natural_key(row[0])))
    if not groups and not whole:
        keep = pick_split([path for path, _ in rows], [label for _, label in rows], split, str(root))
        rows = [rows[index] for index in keep]
    return FileImages(
        name=name,
        classes=classes,
        template=check_template(TEMPLATE if template is None else template),
        root=root,
        paths=tuple(path for path, _ in rows),
        labels=torch.tensor([label for _, label in rows], dtype=torch.int64),
    )


def _is_split(folder: Path) -> bool:
    """Whether a folder is one of several split folders that lie side by side: `photos/train` of `photos`."""
    if _split_of(folder.name) is None:
        return False
    beside = [entry for entry in _entries(folder.parent) if _split_of(entry.name) and entry.is_dir()]
    return len([entry for entry in beside if not _holds_images(entry)]) > 1


def _split_of(name: str) -> str | None:
    """The split that a folder's name stands for."""
    return next((split for split, names in SPLITS.items() if name.lower() in names), None)


def _holds_images(folder: Path) -> bool:
    """Whether images lie directly in a folder."""
    return any(entry.is_file() and is_image_name(entry.name) for entry in _entries(folder))


def _split_folders(root: Path) -> dict[str, Path]:
    """Split folders by split, or none.

    A folder called `train` may also be a class (of vehicles): it is one if images lie directly in it, or
    if it has neighbors that are no splits.
    """
    folders = [entry for entry in _entries(root) if entry.is_dir()]
    found: dict[str, Path] = {}
    for folder in folders:
        split = _split_of(folder.name)
        if split is None:
            if any(image_paths(folder)):
                return {}
            continue
        if _holds_images(folder):
            return {}
        if split in found:
            raise DataError(
                f"{root}: both {found[split].name}/ and {folder.name}/ hold the {split} split; keep one"
            )
        found[split] = folder
    return found


def _wanted(root: Path, groups: dict[str, Path], split: str) -> list[str]:
    """Which split folders a split is made of."""
    if split == "all":
        return list(groups)
    if split == "test" and "test" not in groups and "val" in groups:
        return ["val"]
    if split not in groups:
        there = ", ".join(f"{folder.name}/" for folder in groups.values())
        raise DataError(f"{root}: has no {split}/ folder; it has {there}")
    return [split]


def _refuse_empty(root: Path, groups: dict[str, Path], found: dict[str, dict[str, list[str]]]) -> None:
    for part, classes in found.items():
        for folder, paths in classes.items():
            if not paths:
                where = groups[part] / folder if groups else root / folder
                raise DataError(f"{where}: the class folder holds no images; fill it or remove it")


def _classes(folder: Path) -> dict[str, list[str]]:
    """Images of each class folder, relative to `folder`."""
    return {
        entry.name: [f"{entry.name}/{path}" for path in image_paths(entry)]
        for entry in _entries(folder)
        if entry.is_dir()
    }


def image_paths(folder: Path) -> Iterator[str]:
    """Every image below a folder, relative to it, with `/`."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inner = Path(place).relative_to(folder)
        for file in files:
            if is_image_name(file):
                yield (inner / file).as_posix()


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder and is not hidden, in natural order."""
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    return sorted(entries, key=lambda entry: natural_key(entry.name))
