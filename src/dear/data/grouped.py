"""Benchmarks of known shortcuts in their public layouts: Waterbirds and CelebA.

- Waterbirds (Sagawa et al., ICLR 2020): `metadata.csv` with `img_filename`, `y` (0 landbird, 1 waterbird),
  `split` (0 train, 1 val, 2 test) and `place` (0 land, 1 water), images beside it.
- CelebA (Liu et al., ICCV 2015): `list_attr_celeba` and `list_eval_partition`, as the authors' `.txt` or the
  `.csv` that came later, images in `img_align_celeba`; the class is Blond_Hair, the value beside it Male.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dear._io.files import read_text
from dear.data.paths import Inside
from dear.errors import DataError, DearError

_SPLITS = {"0": "train", "1": "val", "2": "test"}
_MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Grouped:
    """What such a benchmark lists: (path, label) by split, and the value of each path."""

    root: Path
    classes: tuple[str, ...]
    splits: dict[str, list[tuple[str, int]]]
    groups: dict[str, str]


def read_waterbirds(home: Path) -> Grouped:
    """Waterbirds: landbirds and waterbirds, in groups by background (land or water).

    Raises:
        DataError: the table is missing or malformed; the line is named.
    """
    file = home / "metadata.csv"
    rows = _table(file, ("img_filename", "y", "split", "place"))
    birds, places = {"0": 0, "1": 1}, {"0": "land", "1": "water"}
    picked = ((where, r["img_filename"], birds.get(r["y"]), _SPLITS.get(r["split"]), places.get(r["place"]))
              for where, r in rows)  # fmt: skip
    return _collect(home, ("landbird", "waterbird"), picked)


def read_celeba(home: Path, images: str) -> Grouped:
    """CelebA: blond hair or not, in groups by sex.

    Raises:
        DataError: a list is missing or malformed; the line is named.
    """
    split_of = {
        row["image_id"]: row["partition"]
        for _, row in _either(home, "list_eval_partition", ("image_id", "partition"))
    }
    blond, sex = {"-1": 0, "1": 1}, {"-1": "female", "1": "male"}
    rows = _either(home, "list_attr_celeba", ("image_id", "Blond_Hair", "Male"))
    picked = ((where, r["image_id"], blond.get(r["Blond_Hair"]), _SPLITS.get(split_of.get(r["image_id"], "")),
               sex.get(r["Male"])) for where, r in rows)  # fmt: skip
    return _collect(home / images, ("person without blond hair", "person with blond hair"), picked)


Picked = tuple[str, str, int | None, str | None, str | None]


def _collect(root: Path, classes: tuple[str, ...], rows: Iterable[Picked]) -> Grouped:
    """Rows of (where, path, label, split, value), all known, by split."""
    inside = Inside(root)
    splits: dict[str, list[tuple[str, int]]] = {name: [] for name in _SPLITS.values()}
    groups: dict[str, str] = {}
    for where, name, label, split, value in rows:
        if label is None or split is None or value is None:
            raise DataError(
                f"{where}: the class, the split or the group of {name!r} is none of those published"
            )
        path = inside.check(name, where)
        if path in groups:
            raise DataError(f"{where}: the image {path!r} is listed twice")
        groups[path] = value
        splits[split].append((path, label))
    if not groups:
        raise DataError(f"{root}: lists no images")
    return Grouped(inside.root, classes, splits, groups)


def _text(file: Path) -> str:
    try:
        return read_text(file, "list of images", _MAX_BYTES, "utf-8-sig")
    except DearError as error:
        raise DataError(str(error)) from error


def _table(file: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Place and cells of each line of a CSV file that has these columns."""
    reader = csv.DictReader(io.StringIO(_text(file), newline=""), strict=True)
    try:
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise DataError(f"{file}: has no column {missing[0]}")
        for row in reader:
            cells = {column: (row[column] or "").strip() for column in columns}
            yield f"{file}, line {reader.line_num}", cells
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: is not valid CSV ({error})") from error


def _either(home: Path, name: str, columns: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The lines of a CelebA list: `.csv` where it is there, else the authors' `.txt`."""
    if (home / f"{name}.csv").is_file():
        yield from _table(home / f"{name}.csv", columns)
        return
    file = home / f"{name}.txt"
    lines = _text(file).splitlines()
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
            raise DataError(f"{file}, line {number}: has {len(cells)} entries instead of {len(header)}")
        yield f"{file}, line {number}", dict(zip(header, cells, strict=True))
