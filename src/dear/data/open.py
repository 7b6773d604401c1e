"""`open_data` opens every kind of data: folders, tables, saved `datasets` folders, benchmarks, world tasks.

The user's own data is a table (`dear.data.table`) or a folder of class folders, with or without `train/` and
`test/` above them:

```
photos/golden_retriever/1.jpg        photos/train/golden_retriever/1.jpg
photos/tabby_cat/2.jpg               photos/test/golden_retriever/2.jpg
```

A class is a folder, with images at any depth. Classes are in natural order of their folder names; a folder
without images is not a class, and images in `unlabeled/` have no label (`dear.data.unlabeled`). Hidden
files, files of operating systems (`__MACOSX`, `Thumbs.db`, `.DS_Store`), links to folders inside a class,
and files without the ending of an image are ignored. Without split folders, a fifth of each class is held
out for testing by the hash of the path (`dear.data.shots`). If `spec` is a split folder (`photos/val`), it is
used for training and for testing; the images held out of a training on it are those of another split folder.

Benchmarks have their usual folders: CoOp's fifteen, DomainBed's five, two with known groups. Folder, split
file, template and class count of each are in `benchmarks.json`; `dear.data.layouts` reads the images.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dear.data.huggingface import HUB, is_dataset, open_dataset
from dear.data.images import TEMPLATE, DataSource, FileImages, ImageSet
from dear.data.layouts import COOP, READERS, Benchmark, Listing
from dear.data.names import SPLITS, check_classes, check_template, natural_key, readable
from dear.data.records import KINDS
from dear.data.shots import pick_split
from dear.data.stored import BoxedImages
from dear.data.table import open_table
from dear.data.tars import is_tar, open_tars
from dear.errors import DataError, InputError, UsageError
from dear.images.names import image_paths, is_image_name, is_user_file
from dear.utils.files import read_json
from dear.utils.notices import warn
from dear.utils.text import check_name, close_name

WORLD = "world:"
UNLABELED_FOLDER = "unlabeled"  #: next to class folders; its images have no label (`dear.data.unlabeled`)
DOMAINBED = "python -m domainbed.scripts.download (https://github.com/facebookresearch/DomainBed)"
HELD_OUT_SPLIT = "held-out"  #: the images that a training on the same data does not use


def open_data(
    spec: str | os.PathLike[str] | Any,
    split: str = "test",
    root: str | os.PathLike[str] | None = None,
    template: str | None = None,
    name: str | None = None,
    margin: float = 0.0,
) -> ImageSet:
    """Open one split of a dataset.

    Args:
        spec: a folder of class folders; a CSV, JSONL, Parquet, or COCO JSON table; a pandas or polars frame;
            `hf://datasets/owner/name` or a saved `datasets` folder; a WebDataset tar or a folder of them; a
            benchmark's name (with `root`); or `world:NAME`.
        split: "train", "test", "val" where there is one, or "all"; "held-out": the test images of a training
            on `spec`. A split folder (`photos/val`) is used for "train" and "test".
        root: the folder of the benchmarks; for a table, the folder of its relative paths.
        template: prompt with `{}`, instead of the dataset's own.
        name: of the dataset, instead of its own (few-shot draws depend on it).
        margin: added to every box of a table on each side, as a fraction of the box, 0 to 10.

    Raises:
        DataError: the data is missing or malformed.
        UsageError: a benchmark without `root`; a margin where there are no boxes.
    """
    if not 0 <= margin <= 10:
        raise UsageError(f"margin must be from 0 to 10, a fraction of each box, got {margin}")
    images = _open_split(spec, split, root, template, name, margin)
    if margin and len(images) and not isinstance(images, BoxedImages):
        raise UsageError(f"{images.name}: margin = {margin} needs boxes (x, y, width, height); leave it out")
    return images


def _open_split(
    spec: str | os.PathLike[str] | Any,
    split: str,
    root: str | os.PathLike[str] | None,
    template: str | None,
    name: str | None,
    margin: float,
) -> ImageSet:
    if not isinstance(spec, str | os.PathLike):
        split = "test" if split == HELD_OUT_SPLIT else split
        return open_table(spec, split, template=template, name=name, root=root, margin=margin)
    check_data(spec, root)
    text = os.fspath(spec)
    if split == HELD_OUT_SPLIT:
        text, split = _held_out_folder(text), "test"
    if text.startswith(WORLD):
        return _open_world(text, split, template)
    if is_dataset(text):
        return open_dataset(text, split, template, name)
    path = Path(text).expanduser()
    benchmark = find_benchmark(text)
    if benchmark is not None and root is not None:
        dataset = open_benchmark(benchmark.name, split, root, template=template)
        return replace(dataset, source=DataSource(benchmark.name, os.path.abspath(root)))
    images: Any
    if is_tar(path):
        images = open_tars(path, split, template=template, name=name)
    elif os.path.isdir(path):
        images = open_folder(path, split, template=template, name=name)
    else:
        images = open_table(path, split, template=template, name=name, root=root, margin=margin)
    source = DataSource(os.path.abspath(path), None if root is None else os.path.abspath(root))
    with_source: ImageSet = replace(images, source=source)
    return with_source


def split_of_path(spec: str | os.PathLike[str]) -> str | None:
    """The split of a folder next to other split folders (`photos/val`); None for all other data."""
    path = Path(spec).expanduser()
    return _split_of(path.resolve().name) if os.path.isdir(path) and _is_split(path.resolve()) else None


def default_split(spec: str, split: str) -> str:
    """The split to open if no labels are used: all images of a split folder (`photos/val`)."""
    return split if split_of_path(spec) is None else "all"


def open_with_splits(
    spec: str | os.PathLike[str], root: str | os.PathLike[str] | None = None
) -> tuple[ImageSet, tuple[str, ...]]:
    """All images of a dataset, and the split of each."""
    images = open_data(spec, "all", root=root)
    folder_split = split_of_path(spec)
    if folder_split is not None:
        return images, (folder_split,) * len(images)
    split_of: dict[str, str] = {}
    for split in ("train", "val", "test"):
        with suppress(DataError):  # not every dataset has every split
            part = open_data(spec, split, root=root)
            for index in range(len(part)):
                split_of.setdefault(part.key(index), split)
    return images, tuple(split_of.get(images.key(index), "train") for index in range(len(images)))


def check_data(spec: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> None:
    """Raise an error for a path or name that is not a dataset; nothing is read."""
    text = os.fspath(spec)
    if text.startswith(WORLD):
        from dear.world.tasks import find_task

        find_task(text.removeprefix(WORLD))
        return
    path = Path(text).expanduser()
    benchmark = find_benchmark(text)
    if (
        (benchmark is not None and root is not None)
        or os.path.isdir(path)
        or path.suffix.lower() in (*KINDS, ".tar")
    ):
        return
    if text.startswith(HUB):
        return
    if benchmark is not None:
        raise UsageError(
            f"{benchmark.name}: is a benchmark; root must name the folder that holds {benchmark.folder}/",
            hint="data-root",
        )
    if os.path.exists(path):
        raise DataError(f"{path}: must be a folder or a table ({', '.join(KINDS)})")
    suggestion = close_name(text, BENCHMARKS)
    hint = "" if suggestion is None else f"; did you mean {suggestion}?"
    raise DataError(f"{text[:200]}: no such folder, table or dataset{hint}")


def _open_world(spec: str, split: str, template: str | None) -> ImageSet:
    """A task of the attribute world, with its template or another."""
    from dear.data.world_images import world_task

    task = world_task(spec.removeprefix(WORLD), split)
    return task if template is None else replace(task, template=check_template(template))


def list_datasets() -> tuple[str, ...]:
    """Names of all known datasets: benchmarks and tasks of the attribute world."""
    from dear import world

    return (*BENCHMARKS, *(f"{WORLD}{name}" for name in (*world.list_tasks(), *world.list_shortcuts())))


def _read_benchmarks() -> dict[str, Benchmark]:
    table = read_json(Path(__file__).with_name("benchmarks.json"), "table of benchmarks")
    result = {}
    for name, entry in table.items():
        source = entry.pop("source", [DOMAINBED])
        if "split" in entry:
            source.append(f"{entry['split']}: linked from {COOP}")
        domains = tuple(entry.pop("domains", ()))
        result[name] = Benchmark(name=name, domains=domains, source=tuple(source), **entry)
    return result


BENCHMARKS = _read_benchmarks()


def find_benchmark(name: str) -> Benchmark | None:
    """A benchmark by its name, in upper or lower case.

    >>> find_benchmark("oxfordpets").folder
    'oxford_pets'
    """
    return next(
        (benchmark for benchmark in BENCHMARKS.values() if benchmark.name.casefold() == name.casefold()),
        None,
    )


def open_benchmark(
    name: str, split: str, root: str | os.PathLike[str], template: str | None = None
) -> FileImages:
    """One split of a benchmark.

    Args:
        name: one of `BENCHMARKS`.
        split: "train", "val" or "test" as published, or "all".
        root: the parent of the benchmark's folder.
        template: prompt with `{}`; None: the benchmark's.
    """
    benchmark = find_benchmark(name)
    if benchmark is None:
        raise UsageError(f"{name}: no such benchmark; choose from {', '.join(BENCHMARKS)}")
    listing = list_benchmark(benchmark, Path(root))
    rows = _rows_of_split(benchmark, listing, split)
    domains = listing.domains
    return FileImages(
        name=benchmark.name,
        classes=listing.classes,
        template=check_template(benchmark.template if template is None else template),
        root=listing.root,
        paths=tuple(path for path, _ in rows),
        labels=torch.tensor([label for _, label in rows], dtype=torch.int64),
        domains=None if domains is None else tuple(domains[path] for path, _ in rows),
        groups=None if listing.groups is None else tuple(listing.groups[path] for path, _ in rows),
    )


def _rows_of_split(benchmark: Benchmark, listing: Listing, split: str) -> list[tuple[str, int]]:
    """The rows of a split."""
    all_rows = [row for rows in listing.splits.values() for row in rows]
    if listing.domains is not None:
        groups = [(label, listing.domains[path]) for path, label in all_rows]
        part = "test" if split == "val" else split
        indices = pick_split([path for path, _ in all_rows], groups, part, benchmark.name)
        return [all_rows[index] for index in indices]
    if split == "all":
        return all_rows
    if split not in listing.splits:
        raise DataError(f"{benchmark.name}: has no split {split!r}, only {', '.join(listing.splits)} and all")
    return listing.splits[split]


def list_benchmark(benchmark: Benchmark, root: Path) -> Listing:
    """Read the benchmark's lists of images, whether or not the images are there."""
    home = root / benchmark.folder
    if not home.is_dir():
        raise DataError(f"{home}: no such folder; put {benchmark.name} there", hint="data-check")
    listing = READERS[benchmark.kind](benchmark, home)
    try:
        for name in listing.classes:
            check_name(name)
    except InputError as error:
        raise DataError(f"{home}: {error}") from error
    return listing


def open_folder(
    root: str | os.PathLike[str],
    split: str,
    template: str | None = None,
    name: str | None = None,
) -> FileImages:
    """Read a folder of class folders.

    Args:
        root: the folder.
        split: "train", "test", "val", or "all"; "test" is `val/` if there is no `test/`.
        template: prompt with `{}` (default "a photo of a {}.").
        name: of the dataset (default: the folder's name).

    All splits have the classes of all split folders. A warning of the logger "dear" names class folders
    without images.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root}: is not a folder")
    split_of_root = split_of_path(root)
    if split == "val" and split_of_root not in (None, "val"):
        raise DataError(f"{root}: contains the {split_of_root} images; pass the folder with the val images")
    name = name or (root.resolve() if split_of_root is None else root.resolve().parent).name
    groups = _split_folders(root)
    by_split = {key: _images_by_folder(folder) for key, folder in (groups or {"": root}).items()}
    if not any(by_split.values()):
        raise DataError(
            f"{root}: contains no class folders; put the images of each class in a folder with its name"
        )
    folders = _class_folders(root, groups, by_split)
    try:
        classes = check_classes(folders, [readable(folder) for folder in folders], str(root))
    except InputError as error:
        raise DataError(f"{root}: {error}") from error

    parts = [""] if not groups else _parts_of_split(root, groups, split)
    number = {folder: label for label, folder in enumerate(folders)}
    rows = [
        ("/".join((groups[part].name, path) if groups else (path,)), number[folder])
        for part in parts
        for folder, paths in by_split[part].items()
        for path in paths
    ]
    rows.sort(key=lambda row: (row[1], natural_key(row[0])))
    if not groups and split_of_root is None:
        indices = pick_split([path for path, _ in rows], [label for _, label in rows], split, str(root), root)
        rows = [rows[index] for index in indices]
    return FileImages(
        name=name,
        classes=classes,
        template=check_template(TEMPLATE if template is None else template),
        root=root,
        paths=tuple(path for path, _ in rows),
        labels=torch.tensor([label for _, label in rows], dtype=torch.int64),
    )


def _is_split(folder: Path) -> bool:
    """Whether a folder has other split folders next to it: `photos/train` in `photos`."""
    if _split_of(folder.name) is None:
        return False
    siblings = [entry for entry in _entries(folder.parent) if _split_of(entry.name) and entry.is_dir()]
    return len([entry for entry in siblings if not _contains_images(entry)]) > 1


def _held_out_folder(spec: str) -> str:
    """The folder of the test images of a training on `spec`: another split folder, or `spec`."""
    split_of_root = split_of_path(spec)
    if split_of_root is None:
        return spec
    folder = Path(spec).expanduser()
    others = {
        _split_of(entry.name): entry.name for entry in _entries(folder.resolve().parent) if entry.is_dir()
    }
    name = next(
        (others[split] for split in ("test", "val") if split in others and split != split_of_root), None
    )
    if name is None:
        raise DataError(
            f"{spec}: contains the {split_of_root} images, and there is no folder with test images next to it"
        )
    parent = folder.parent if folder.name == folder.resolve().name else folder.resolve().parent
    return str(parent / name)


def _split_of(name: str) -> str | None:
    """The split that a folder's name denotes; None if it denotes none."""
    return next((split for split, names in SPLITS.items() if name.lower() in names), None)


def _contains_images(folder: Path) -> bool:
    """Whether a folder directly contains images."""
    return any(entry.is_file() and is_image_name(entry.name) for entry in _entries(folder))


def _split_folders(root: Path) -> dict[str, Path]:
    """Split folders by split, or none.

    A folder named `train` may also be a class (of vehicles): it is one if it directly contains images, or if
    there are other folders next to it that are not splits.
    """
    folders = [entry for entry in _entries(root) if entry.is_dir()]
    by_split: dict[str, Path] = {}
    for folder in folders:
        split = _split_of(folder.name)
        if split is None:
            if any(image_paths(folder)):
                return {}
            continue
        if _contains_images(folder):
            return {}
        if split in by_split:
            raise DataError(
                f"{root}: both {by_split[split].name}/ and {folder.name}/ contain the {split} split; keep one"
            )
        by_split[split] = folder
    return by_split


def _parts_of_split(root: Path, groups: dict[str, Path], split: str) -> list[str]:
    """The split folders of a split."""
    if split == "all":
        return list(groups)
    if split == "test" and "test" not in groups and "val" in groups:
        return ["val"]
    if split not in groups:
        names = ", ".join(f"{folder.name}/" for folder in groups.values())
        raise DataError(f"{root}: has no {split}/ folder; it has {names}")
    return [split]


def _class_folders(
    root: Path, groups: dict[str, Path], by_split: dict[str, dict[str, list[str]]]
) -> list[str]:
    """The class folders with images in any split, in natural order; a warning names empty ones."""
    folders = {folder for classes in by_split.values() for folder, paths in classes.items() if paths}
    if not folders:
        raise DataError(f"{root}: its class folders contain no images")
    for part, classes in by_split.items():
        empty = [folder for folder, paths in classes.items() if not paths]
        if empty:
            where = groups[part] if groups else root
            more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
            warn(f"{where}: class folders without images are skipped: {', '.join(empty[:5])}{more}")
    return sorted(folders, key=natural_key)


def _images_by_folder(folder: Path) -> dict[str, list[str]]:
    """Images of each class folder, relative to `folder`."""
    return {
        entry.name: [f"{entry.name}/{path}" for path in image_paths(entry)]
        for entry in _entries(folder)
        if entry.is_dir()
    }


def _entries(folder: Path) -> list[Path]:
    """Entries of a folder in natural order, without `unlabeled/` and files of operating systems."""
    entries = [
        entry for entry in folder.iterdir() if is_user_file(entry.name) and entry.name != UNLABELED_FOLDER
    ]
    return sorted(entries, key=lambda entry: natural_key(entry.name))
