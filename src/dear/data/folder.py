"""A folder of class folders, with or without `train/` and `test/` above them.

```
photos/golden_retriever/1.jpg        photos/train/golden_retriever/1.jpg
photos/tabby_cat/2.jpg               photos/test/golden_retriever/2.jpg
```

A class is a folder; images at any depth below it are its own. Classes are in natural order of their folder
names; a folder without images is no class. Hidden files, what operating systems leave behind (`__MACOSX`,
`Thumbs.db`, `.DS_Store`), links to folders inside a class, and files that do not end like images are ignored.
Where there are no split folders, a fifth of each class is held out for testing by the hash of the path
(`dear.data.shots`); but `photos/train` or `photos/test`, given by itself, is taken whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dear._io.image_file import image_paths, is_image_name, is_own_name
from dear._io.notes import warn
from dear.data.images import FileImages
from dear.data.names import TEMPLATE, check_classes, check_template, natural_key, readable
from dear.data.shots import pick_split
from dear.errors import DataError, InputError

# Folders that operating systems and network drives leave among a person's own.
# What folders may be called, by the split they hold.
SPLITS = {"train": ("train", "training"), "test": ("test", "testing"), "val": ("val", "valid", "validation")}


def open_folder(
    root: str | os.PathLike[str],
    split: str,
    template: str | None = None,
    name: str | None = None,
) -> FileImages:
    """Read a folder of class folders.

    Args:
        root: the folder.
        split: "train", "test", "val", or "all". Where there is a `val/` but no `test/`, that is tested on.
        template: prompt with `{}` (default "a photo of a {}.").
        name: of the dataset (default: the folder's name).

    Returns:
        The images of the split. All splits have the same classes: those of all split folders together. Class
        folders without images are named in a warning of the logger "dear".

    Raises:
        DataError: no such folder or split, no classes, no images, or two classes that read the same.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root}: is not a folder")
    whole = _is_split(root.resolve())
    name = name or (root.resolve().parent if whole else root.resolve()).name
    groups = _split_folders(root)
    found = {key: _classes(folder) for key, folder in (groups or {"": root}).items()}
    if not any(found.values()):
        raise DataError(
            f"{root}: holds no class folders; put the images of each class in a folder of its name"
        )
    folders = _with_images(root, groups, found)
    try:
        classes = check_classes(folders, [readable(folder) for folder in folders], str(root))
    except InputError as error:
        raise DataError(f"{root}: {error}") from error

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


def _with_images(root: Path, groups: dict[str, Path], found: dict[str, dict[str, list[str]]]) -> list[str]:
    """The class folders that hold images in any split, in natural order; empty ones are told.

    Raises:
        DataError: no folder holds an image.
    """
    full = {folder for classes in found.values() for folder, paths in classes.items() if paths}
    if not full:
        raise DataError(f"{root}: its class folders hold no images")
    for part, classes in found.items():
        empty = [folder for folder, paths in classes.items() if not paths]
        if empty:
            where = groups[part] if groups else root
            more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
            warn(f"{where}: class folders without images are skipped: {', '.join(empty[:5])}{more}")
    return sorted(full, key=natural_key)


def _classes(folder: Path) -> dict[str, list[str]]:
    """Images of each class folder, relative to `folder`."""
    return {
        entry.name: [f"{entry.name}/{path}" for path in image_paths(entry)]
        for entry in _entries(folder)
        if entry.is_dir()
    }


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder and is a person's own, in natural order."""
    entries = [entry for entry in folder.iterdir() if is_own_name(entry.name)]
    return sorted(entries, key=lambda entry: natural_key(entry.name))
