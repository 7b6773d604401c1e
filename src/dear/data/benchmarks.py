"""The field's benchmarks in their usual folders: CoOp's fifteen, DomainBed's five, two with known groups.

Where each lies, its split file, template and class count are data (`benchmarks.json`); here is how each kind
is read:

- `split`: `split_zhou_*.json`, three lists of [path, label, class name];
- `imagenet`: folders by WordNet id under `train` and `val` (the test split), names in `classnames.txt`;
- `imagenet-test`: ImageNet's variants, test split only; A and R have their own 200 of the classes;
- `aircraft`: lists of `image class` by split, classes in `variants.txt`;
- `domains`: `domain/class/image`; no split is published, a fifth of each class of each domain is held out;
- `waterbirds`, `celeba`: images with a known value beside the class; see `grouped`.

Underscores in class names are read as spaces, and nothing else is changed, as the field does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dear._io.files import read_json, read_text
from dear._io.printable import check_name
from dear.data.folder import image_paths
from dear.data.grouped import read_celeba, read_waterbirds
from dear.data.images import FileImages
from dear.data.names import check_template, spaced
from dear.data.paths import Inside
from dear.data.split import pick_split
from dear.errors import DataError, DearError, InputError, UsageError

COOP = "https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md"
DOMAINBED = "python -m domainbed.scripts.download (https://github.com/facebookresearch/DomainBed)"


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark lies and how it is read.

    Attributes:
        name: as papers call it.
        kind: how it is read; see the module.
        folder: its folder under the data root.
        template: its prompt (supplement, Table 4).
        classes: how many it has.
        images: the folder of images in `folder`.
        split: the split file in `folder`.
        folders: what class folders are called, "wordnet" or "numbers".
        subset: only some of ImageNet's classes, those with a folder.
        domains: its domains.
        source: where the field gets it.
    """

    name: str
    kind: str
    folder: str
    template: str
    classes: int
    images: str = ""
    split: str = ""
    folders: str = ""
    subset: bool = False
    domains: tuple[str, ...] = ()
    source: tuple[str, ...] = ()


def _load() -> dict[str, Benchmark]:
    table = read_json(Path(__file__).with_name("benchmarks.json"), "table of benchmarks")
    result = {}
    for name, entry in table.items():
        source = entry.pop("source", [DOMAINBED])
        if "split" in entry:
            source.append(f"{entry['split']}: linked from {COOP}")
        domains = tuple(entry.pop("domains", ()))
        result[name] = Benchmark(name=name, domains=domains, source=tuple(source), **entry)
    return result


BENCHMARKS = _load()


@dataclass(frozen=True)
class Listing:
    """Images as a benchmark's files list them: one (path, label) each, by split, and the classes."""

    root: Path
    classes: tuple[str, ...]
    splits: dict[str, list[tuple[str, int]]]
    domains: dict[str, str] | None = None
    groups: dict[str, str] | None = None


def find_benchmark(name: str) -> Benchmark | None:
    """A benchmark by its name, whatever the case.

    >>> find_benchmark("oxfordpets").folder
    'oxford_pets'
    """
    return next((known for known in BENCHMARKS.values() if known.name.casefold() == name.casefold()), None)


def open_benchmark(
    name: str, split: str, root: str | os.PathLike[str], template: str | None = None
) -> FileImages:
    """One split of a benchmark.

    Args:
        name: one of `BENCHMARKS`.
        split: "train", "val" or "test" as published, or "all".
        root: the folder that holds the benchmark's folder.
        template: instead of the benchmark's own.

    Raises:
        DataError: a file is missing or malformed, or a path leaves the folder.
        UsageError: no such benchmark.
    """
    benchmark = find_benchmark(name)
    if benchmark is None:
        raise UsageError(f"{name}: no such benchmark; there are {', '.join(BENCHMARKS)}")
    listing = list_benchmark(benchmark, Path(root))
    rows = _pick(benchmark, listing, split)
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


def _pick(benchmark: Benchmark, listing: Listing, split: str) -> list[tuple[str, int]]:
    """The rows of a split."""
    everything = [row for rows in listing.splits.values() for row in rows]
    if listing.domains is not None:
        groups = [(label, listing.domains[path]) for path, label in everything]
        wanted = "test" if split == "val" else split
        chosen = pick_split([path for path, _ in everything], groups, wanted, benchmark.name)
        return [everything[index] for index in chosen]
    if split == "all":
        return everything
    if split not in listing.splits:
        raise DataError(f"{benchmark.name}: has no split {split!r}, only {', '.join(listing.splits)} and all")
    return listing.splits[split]


def list_benchmark(benchmark: Benchmark, root: Path) -> Listing:
    """What the benchmark's files list, whether or not the images are there.

    Raises:
        DataError: a file is missing or malformed, or a path leaves the folder.
    """
    readers = {
        "split": _read_split,
        "imagenet": _read_imagenet,
        "imagenet-test": _read_imagenet_test,
        "aircraft": _read_aircraft,
        "domains": _read_domains,
        "waterbirds": _read_grouped,
        "celeba": _read_grouped,
    }
    home = root / benchmark.folder
    if not home.is_dir():
        raise DataError(f"{home}: no such folder; {benchmark.name} must lie there", hint="data-check")
    listing = readers[benchmark.kind](benchmark, home)
    try:
        for name in listing.classes:
            check_name(name)
    except InputError as error:
        raise DataError(f"{home}: {error}") from error
    return listing


def _read_split(benchmark: Benchmark, home: Path) -> Listing:
    """`split_zhou_*.json`; labels are renumbered by their order, in case classes were cut out."""
    file = home / benchmark.split
    try:
        table = read_json(file, "split file")
    except DearError as error:
        raise DataError(f"{error}: it comes from {COOP}") from error
    if not isinstance(table, dict) or not table:
        raise DataError(f"{file}: is not a split file of lists by split")
    inside = Inside(home / benchmark.images)
    names: dict[int, str] = {}
    splits: dict[str, list[tuple[str, int]]] = {}
    for split, rows in table.items():
        if not isinstance(rows, list):
            raise DataError(f"{file}: its split {split!r} is not a list")
        splits[split] = []
        for number, row in enumerate(rows, 1):
            path, label, name = _split_row(row, f"{file}, {split} row {number}")
            if names.setdefault(label, name) != name:
                raise DataError(
                    f"{file}, {split} row {number}: label {label} is {names[label]!r} and {name!r}"
                )
            splits[split].append((inside.check(path, f"{file}, {split} row {number}"), label))
    order = {label: place for place, label in enumerate(sorted(names))}
    classes = tuple(spaced(names[label]) for label in order)
    return Listing(
        inside.root, classes, {key: [(path, order[x]) for path, x in rows] for key, rows in splits.items()}
    )


def _split_row(row: Any, where: str) -> tuple[str, int, str]:
    match row:
        case [str(path), int(label), str(name)] if not isinstance(label, bool):
            return path, label, name
    raise DataError(f"{where}: is not [path, label, class name]")


def _read_imagenet(benchmark: Benchmark, home: Path) -> Listing:
    names = _classnames(home)
    number = {wordnet: label for label, wordnet in enumerate(names)}
    images = home / benchmark.images
    train = _in_folders(images, images / "train", number)
    return Listing(
        images,
        tuple(names.values()),
        {"train": train, "test": _in_folders(images, images / "val", number)},
    )


def _read_imagenet_test(benchmark: Benchmark, home: Path) -> Listing:
    names = _classnames(home)
    images = home / benchmark.images
    if benchmark.subset:  # A and R are scored among their own 200 classes, in ImageNet's order
        names = {wordnet: name for wordnet, name in names.items() if (images / wordnet).is_dir()}
    number = {wordnet: label for label, wordnet in enumerate(names)}
    if benchmark.folders == "numbers":  # V2 calls its folders 0 to 999
        number = {str(label): label for label in number.values()}
    return Listing(images, tuple(names.values()), {"test": _in_folders(images, images, number)})


def _classnames(home: Path) -> dict[str, str]:
    """Class names by WordNet id, in order of the ids; ImageNet's own file serves its variants too."""
    places = [home / "classnames.txt", home.parent / "imagenet" / "classnames.txt"]
    file = next((place for place in places if place.is_file()), places[0])
    names = {}
    for number, line in enumerate(_lines(file), 1):
        wordnet, _, name = line.partition(" ")
        if not name:
            raise DataError(f"{file}, line {number}: is not a WordNet id and a name")
        names[wordnet] = spaced(name)
    return dict(sorted(names.items()))


def _in_folders(root: Path, folder: Path, number: dict[str, int]) -> list[tuple[str, int]]:
    """Images in class folders whose labels are known, by label and path."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    above = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    rows = []
    for entry in os.scandir(folder):
        if entry.is_dir() and not entry.name.startswith("."):
            if entry.name not in number:
                raise DataError(f"{folder}: the class folder {entry.name!r} is not in classnames.txt")
            label = number[entry.name]
            rows += [(f"{above}{entry.name}/{path}", label) for path in image_paths(Path(entry.path))]
    return sorted(rows, key=lambda row: (row[1], row[0]))


def _read_aircraft(benchmark: Benchmark, home: Path) -> Listing:
    """`images_variant_train.txt` and its like: an image number, a space, the variant."""
    variants = _lines(home / "variants.txt")
    number = {name: label for label, name in enumerate(variants)}
    inside = Inside(home / benchmark.images)
    splits: dict[str, list[tuple[str, int]]] = {}
    for split in ("train", "val", "test"):
        file = home / f"images_variant_{split}.txt"
        splits[split] = []
        for line_number, line in enumerate(_lines(file), 1):
            image, _, name = line.partition(" ")
            if name not in number:
                raise DataError(f"{file}, line {line_number}: {name!r} is not in variants.txt")
            path = inside.check(f"{image}.jpg", f"{file}, line {line_number}")
            splits[split].append((path, number[name]))
    return Listing(inside.root, tuple(spaced(name) for name in variants), splits)


def _read_domains(benchmark: Benchmark, home: Path) -> Listing:
    missing = [domain for domain in benchmark.domains if not (home / domain).is_dir()]
    if missing:
        raise DataError(f"{home}: has no folder for the domain {missing[0]!r}", hint="data-check")
    folders = {domain: _folders(home / domain) for domain in benchmark.domains}
    classes = sorted({name for names in folders.values() for name in names})
    rows, domains = [], {}
    for domain, names in folders.items():
        for name in names:
            for path in sorted(image_paths(home / domain / name)):
                key = f"{domain}/{name}/{path}"
                domains[key] = domain
                rows.append((key, classes.index(name)))
    return Listing(home, tuple(spaced(name) for name in classes), {"all": rows}, domains)


def _read_grouped(benchmark: Benchmark, home: Path) -> Listing:
    found = read_waterbirds(home) if benchmark.kind == "waterbirds" else read_celeba(home, benchmark.images)
    return Listing(found.root, found.classes, found.splits, groups=found.groups)


def _folders(folder: Path) -> Iterable[str]:
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )


def _lines(file: Path) -> list[str]:
    try:
        text = read_text(file, "list of names or images")
    except DearError as error:
        raise DataError(str(error), hint="data-check") from error
    return [line.strip() for line in text.splitlines() if line.strip()]
