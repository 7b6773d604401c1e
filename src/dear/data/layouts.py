"""How each kind of benchmark folder is read: from its files to images and labels.

- `split`: `split_zhou_*.json`, three lists of [path, label, class name];
- `imagenet`: folders by WordNet id under `train` and `val` (the test split), names in `classnames.txt`;
- `imagenet-test`: ImageNet's variants, test split only; A and R have their own 200 of the classes;
- `aircraft`: lists of `image class` by split, classes in `variants.txt`;
- `domains`: `domain/class/image`; no split is published, a fifth of each class of each domain is held out;
- `waterbirds` (Sagawa et al., ICLR 2020): `metadata.csv` with `img_filename`, `y` (0 landbird, 1 waterbird),
  `split` (0 train, 1 val, 2 test) and `place` (0 land, 1 water), images next to it;
- `celeba` (Liu et al., ICCV 2015): `list_attr_celeba` and `list_eval_partition`, as the authors' `.txt`
  or the later `.csv`, images in `img_align_celeba`; the class is Blond_Hair, the group Male.

Underscores in class names become spaces, as in CoOp's code; nothing else is changed.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dear.data.names import underscores_to_spaces
from dear.data.paths import ConfinedPaths, read_list
from dear.errors import DataError, DearError
from dear.images.names import image_paths
from dear.utils.files import read_json

COOP = "https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md"
_SPLITS = {"0": "train", "1": "val", "2": "test"}


@dataclass(frozen=True)
class Benchmark:
    """The folder of a benchmark and how it is read."""

    name: str  #: as papers call it
    kind: str  #: how it is read; see the module
    folder: str  #: its folder under the data root
    template: str  #: its prompt (supplement, Table 4)
    classes: int  #: number of classes
    images: str = ""  #: the folder of images in `folder`
    split: str = ""  #: the split file in `folder`
    folders: str = ""  #: names of class folders, "wordnet" or "numbers"
    subset: bool = False  #: only some of ImageNet's classes, those with a folder
    domains: tuple[str, ...] = ()  #: its domains
    source: tuple[str, ...] = ()  #: where to download it


@dataclass(frozen=True)
class Listing:
    """Images as a benchmark's files list them: one (path, label) each, by split, and the classes."""

    root: Path
    classes: tuple[str, ...]
    splits: dict[str, list[tuple[str, int]]]
    domains: dict[str, str] | None = None
    groups: dict[str, str] | None = None


def _read_split(benchmark: Benchmark, home: Path) -> Listing:
    """`split_zhou_*.json`; labels are renumbered in their order, in case classes were removed."""
    file = home / benchmark.split
    try:
        table = read_json(file, "split file")
    except DearError as error:
        raise DataError(f"{error}: it comes from {COOP}") from error
    if not isinstance(table, dict) or not table:
        raise DataError(
            f"{file}: a split file must be an object with a list per split, got {str(table)[:40]!r}"
        )
    inside = ConfinedPaths(home / benchmark.images)
    names: dict[int, str] = {}
    splits: dict[str, list[tuple[str, int]]] = {}
    for split, rows in table.items():
        if not isinstance(rows, list):
            raise DataError(f"{file}: split {split!r} must be a list, got {str(rows)[:40]!r}")
        splits[split] = []
        for number, row in enumerate(rows, 1):
            path, label, name = _parse_split_row(row, f"{file}, {split} row {number}")
            if names.setdefault(label, name) != name:
                raise DataError(
                    f"{file}, {split} row {number}: label {label} must have one class name, got "
                    f"{names[label]!r} and {name!r}"
                )
            splits[split].append((inside.check(path, f"{file}, {split} row {number}"), label))
    order = {label: number for number, label in enumerate(sorted(names))}
    classes = tuple(underscores_to_spaces(names[label]) for label in order)
    return Listing(
        inside.root, classes, {key: [(path, order[x]) for path, x in rows] for key, rows in splits.items()}
    )


def _parse_split_row(row: Any, where: str) -> tuple[str, int, str]:
    match row:
        case [str(path), int(label), str(name)] if not isinstance(label, bool):
            return path, label, name
    raise DataError(f"{where}: must be [path, label, class name], got {str(row)[:80]}")


def _read_imagenet(benchmark: Benchmark, home: Path) -> Listing:
    names = _read_class_names(home)
    number = {wordnet: label for label, wordnet in enumerate(names)}
    images = home / benchmark.images
    train = _images_in_folders(images, images / "train", number)
    return Listing(
        images,
        tuple(names.values()),
        {"train": train, "test": _images_in_folders(images, images / "val", number)},
    )


def _read_imagenet_test(benchmark: Benchmark, home: Path) -> Listing:
    names = _read_class_names(home)
    images = home / benchmark.images
    if benchmark.subset:  # A and R are scored among their own 200 classes, in ImageNet's order
        names = {wordnet: name for wordnet, name in names.items() if (images / wordnet).is_dir()}
    number = {wordnet: label for label, wordnet in enumerate(names)}
    if benchmark.folders == "numbers":  # V2 calls its folders 0 to 999
        number = {str(label): label for label in number.values()}
    return Listing(images, tuple(names.values()), {"test": _images_in_folders(images, images, number)})


def _read_class_names(home: Path) -> dict[str, str]:
    """Class names by WordNet id, in order of the ids; ImageNet's own file serves its variants too."""
    candidates = [home / "classnames.txt", home.parent / "imagenet" / "classnames.txt"]
    file = next((candidate for candidate in candidates if candidate.is_file()), candidates[0])
    names = {}
    for number, line in enumerate(_read_lines(file), 1):
        wordnet, _, name = line.partition(" ")
        if not name:
            raise DataError(f"{file}, line {number}: must be a WordNet id and a name, got {line[:80]!r}")
        names[wordnet] = underscores_to_spaces(name)
    return dict(sorted(names.items()))


def _images_in_folders(root: Path, folder: Path, number: dict[str, int]) -> list[tuple[str, int]]:
    """Images in class folders whose labels are known, by label and path."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    rows = []
    for entry in os.scandir(folder):
        if entry.is_dir() and not entry.name.startswith("."):
            if entry.name not in number:
                raise DataError(f"{folder}: the class folder {entry.name!r} is not in classnames.txt")
            label = number[entry.name]
            rows += [(f"{prefix}{entry.name}/{path}", label) for path in image_paths(Path(entry.path))]
    return sorted(rows, key=lambda row: (row[1], row[0]))


def _read_aircraft(benchmark: Benchmark, home: Path) -> Listing:
    """`images_variant_train.txt` and its like: an image number, a space, the variant."""
    variants = _read_lines(home / "variants.txt")
    number = {name: label for label, name in enumerate(variants)}
    inside = ConfinedPaths(home / benchmark.images)
    splits: dict[str, list[tuple[str, int]]] = {}
    for split in ("train", "val", "test"):
        file = home / f"images_variant_{split}.txt"
        splits[split] = []
        for line_number, line in enumerate(_read_lines(file), 1):
            image, _, name = line.partition(" ")
            if name not in number:
                raise DataError(f"{file}, line {line_number}: {name!r} is not in variants.txt")
            path = inside.check(f"{image}.jpg", f"{file}, line {line_number}")
            splits[split].append((path, number[name]))
    return Listing(inside.root, tuple(underscores_to_spaces(name) for name in variants), splits)


def _read_domains(benchmark: Benchmark, home: Path) -> Listing:
    missing = [domain for domain in benchmark.domains if not (home / domain).is_dir()]
    if missing:
        raise DataError(f"{home}: has no folder for the domain {missing[0]!r}", hint="data-check")
    folders = {domain: _subfolders(home / domain) for domain in benchmark.domains}
    classes = sorted({name for names in folders.values() for name in names})
    rows, domains = [], {}
    for domain, names in folders.items():
        for name in names:
            for path in sorted(image_paths(home / domain / name)):
                key = f"{domain}/{name}/{path}"
                domains[key] = domain
                rows.append((key, classes.index(name)))
    return Listing(home, tuple(underscores_to_spaces(name) for name in classes), {"all": rows}, domains)


def _subfolders(folder: Path) -> Iterable[str]:
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )


def _read_lines(file: Path) -> list[str]:
    text = read_list(file, "list of names or images", hint="data-check")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _read_waterbirds(benchmark: Benchmark, home: Path) -> Listing:
    """Waterbirds: landbirds and waterbirds, in groups by background (land or water)."""
    file = home / "metadata.csv"
    rows = _read_table(file, ("img_filename", "y", "split", "place"))
    birds, grounds = {"0": 0, "1": 1}, {"0": "land", "1": "water"}
    images = ((where, r["img_filename"], birds.get(r["y"]), _SPLITS.get(r["split"]), grounds.get(r["place"]))
              for where, r in rows)  # fmt: skip
    return _collect(home, ("landbird", "waterbird"), images)


def _read_celeba(benchmark: Benchmark, home: Path) -> Listing:
    """CelebA: blond hair or not, in groups by sex."""
    split_of = {
        row["image_id"]: row["partition"]
        for _, row in _read_celeba_list(home, "list_eval_partition", ("image_id", "partition"))
    }
    blond, sex = {"-1": 0, "1": 1}, {"-1": "female", "1": "male"}
    rows = _read_celeba_list(home, "list_attr_celeba", ("image_id", "Blond_Hair", "Male"))
    images = ((where, r["image_id"], blond.get(r["Blond_Hair"]), _SPLITS.get(split_of.get(r["image_id"], "")),
               sex.get(r["Male"])) for where, r in rows)  # fmt: skip
    return _collect(home / benchmark.images, ("person without blond hair", "person with blond hair"), images)


ListedImage = tuple[str, str, int | None, str | None, str | None]


def _collect(root: Path, classes: tuple[str, ...], rows: Iterable[ListedImage]) -> Listing:
    """Rows of (where, path, label, split, value), all known, by split."""
    inside = ConfinedPaths(root)
    splits: dict[str, list[tuple[str, int]]] = {name: [] for name in _SPLITS.values()}
    groups: dict[str, str] = {}
    for where, name, label, split, value in rows:
        if label is None or split is None or value is None:
            raise DataError(f"{where}: the class, split or group of {name!r} is unknown")
        path = inside.check(name, where)
        if path in groups:
            raise DataError(f"{where}: the image {path!r} is listed twice")
        groups[path] = value
        splits[split].append((path, label))
    if not groups:
        raise DataError(f"{root}: lists no images")
    return Listing(inside.root, classes, splits, groups=groups)


def _read_table(file: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Place and cells of each line of a CSV file that has these columns."""
    reader = csv.DictReader(io.StringIO(read_list(file, "list of images"), newline=""), strict=True)
    try:
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise DataError(f"{file}: has no column {missing[0]}")
        for row in reader:
            cells = {column: (row[column] or "").strip() for column in columns}
            yield f"{file}, line {reader.line_num}", cells
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: is not valid CSV ({error})") from error


def _read_celeba_list(
    home: Path, name: str, columns: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The lines of a CelebA list: `.csv` where it is there, else the authors' `.txt`."""
    if (home / f"{name}.csv").is_file():
        yield from _read_table(home / f"{name}.csv", columns)
        return
    file = home / f"{name}.txt"
    lines = read_list(file, "list of images").splitlines()
    if name == "list_eval_partition":  # image and number, no header
        header, first = list(columns), 0
    else:  # the number of images, then the attributes' names
        header, first = ["image_id", *(lines[1].split() if len(lines) > 1 else [])], 2
    missing = [column for column in columns if column not in header]
    if missing:
        raise DataError(f"{file}: has no column {missing[0]}")
    for number, line in enumerate(lines[first:], first + 1):
        cells = line.split()
        if not cells:
            continue
        if len(cells) != len(header):
            raise DataError(f"{file}, line {number}: must have {len(header)} entries, got {len(cells)}")
        yield f"{file}, line {number}", dict(zip(header, cells, strict=True))


READERS: Final[dict[str, Callable[[Benchmark, Path], Listing]]] = {
    "split": _read_split,
    "imagenet": _read_imagenet,
    "imagenet-test": _read_imagenet_test,
    "aircraft": _read_aircraft,
    "domains": _read_domains,
    "waterbirds": _read_waterbirds,
    "celeba": _read_celeba,
}
