"""A table of images: CSV with a header, or JSONL with one object per line.

Columns: `path` (relative to the table's folder), `label`, and as wanted `classname`, `split`, `domain`,
`group` (a value beside the class, for accuracy in the worst group of class and value).
Without `classname`, labels are class names and are read like folder names (`golden_retriever` is "golden
retriever"); with it, the class name stands there (only underscores are read as spaces) and `label` may be a
number. Classes are in the order of their labels: by value if all are whole numbers, else in natural order.
Rows with an empty label are unlabeled images (`dear.data.unlabeled`). Other columns are ignored.

Paths may not leave the table's folder, neither by `..` nor by a link, and no image may stand in it twice:
it could be trained on and tested, or have two labels. Where there is no `split` column, a fifth of each
class (and domain) is held out for testing by the hash of the path.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dear.data.images import (
    TEMPLATE,
    FileImages,
    check_classes,
    check_template,
    natural_key,
    readable,
    spaced,
)
from dear.data.paths import Inside, read_list
from dear.data.shots import pick_split
from dear.errors import DataError, DearError, InputError
from dear.utils.text import check_name, parse_json

REQUIRED = ("path", "label")
OPTIONAL = ("classname", "split", "domain", "group")
_WHOLE = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class Row:
    """One row of a table; columns that the table lacks are None."""

    number: int
    path: str
    label: str
    classname: str | None = None
    split: str | None = None
    domain: str | None = None
    group: str | None = None


def open_table(
    path: str | os.PathLike[str],
    split: str,
    template: str | None = None,
    name: str | None = None,
    root: str | os.PathLike[str] | None = None,
) -> FileImages:
    """Read a CSV or JSONL table.

    Args:
        path: the table; its ending tells its kind.
        split: a value of the `split` column, or "all".
        template: prompt with `{}` (default "a photo of a {}.").
        name: of the dataset (default: the table's name; of an `index.csv` its folder's).
        root: the folder that paths start from (default: the table's).
    """
    path = Path(path)
    folder = Path(root) if root is not None else path.parent
    rows = [row for row in read_table(path, folder) if row.label]
    if not rows:
        raise DataError(f"{path}: no row has a label; a dataset needs some")
    classes, labels = _classes(rows, path)
    if rows[0].split is None:
        groups = [(row.label, row.domain) for row in rows]
        chosen = pick_split([row.path for row in rows], groups, split, str(path), folder)
    else:
        chosen = [index for index, row in enumerate(rows) if split in ("all", row.split)]
        if not chosen:
            there = ", ".join(sorted({row.split or "" for row in rows}))
            raise DataError(f"{path}: has no rows of split {split!r}; it has {there}")
    taken = [rows[index] for index in chosen]
    return FileImages(
        name=name or (path.resolve().parent.name if path.stem == "index" else path.stem),
        classes=classes,
        template=check_template(TEMPLATE if template is None else template),
        root=folder,
        paths=tuple(row.path for row in taken),
        labels=torch.tensor([labels[row.label] for row in taken], dtype=torch.int64),
        domains=None if rows[0].domain is None else tuple(row.domain or "" for row in taken),
        groups=None if rows[0].group is None else tuple(row.group or "" for row in taken),
    )


def read_table(path: Path, root: Path, required: tuple[str, ...] = REQUIRED) -> list[Row]:
    """Every row of a table, checked; see `open_table`. The label of an unlabeled image is ""."""
    records = _jsonl(path) if path.suffix.lower() in (".jsonl", ".ndjson") else _csv(path, required)
    inside = Inside(root)
    rows: list[Row] = []
    first: dict[str, int] = {}
    columns: frozenset[str] | None = None
    for number, cells_of_row in records:
        where = f"{path}, row {number}"
        record = dict(cells_of_row)
        if "label" not in required or ("label" in record and record["label"] is None):
            record["label"] = record.get("label") or ""
        present = frozenset(key for key in REQUIRED + OPTIONAL if record.get(key) is not None)
        missing = [key for key in required if key not in present]
        if missing:
            raise DataError(f"{where}: has no {' and no '.join(missing)}")
        if columns is not None and present != columns:
            odd = sorted(present ^ columns)[0]
            raise DataError(f"{where}: some rows have {odd!r} and others do not; fill it in all or in none")
        columns = present
        cells = {key: _cell(record[key], key, where) for key in sorted(present)}
        image = inside.check(cells["path"], where)
        if image in first:
            raise DataError(f"{where}: the image {image!r} stands in row {first[image]} already; keep one")
        first[image] = number
        if "split" in cells:
            cells["split"] = cells["split"].lower()
        rows.append(Row(number, **{**cells, "path": image}))
    if not rows:
        raise DataError(f"{path}: the table has no rows")
    return rows


def _cell(value: Any, column: str, where: str) -> str:
    """A cell as text: JSON may also give whole numbers as labels."""
    if isinstance(value, int) and not isinstance(value, bool) and column == "label":
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"{where}: {column} is {value!r}, not a text")
    if not value.strip() and column != "label":
        raise DataError(f"{where}: {column} is empty; fill it or remove the row")
    return value if column == "path" else value.strip()


def _classes(rows: list[Row], path: Path) -> tuple[tuple[str, ...], dict[str, int]]:
    """Class names in order, and the number of each label."""
    names: dict[str, str] = {}
    for row in rows:
        try:
            name = readable(row.label) if row.classname is None else spaced(check_name(row.classname))
        except InputError as error:
            raise DataError(f"{path}, row {row.number}: {error}") from error
        if names.setdefault(row.label, name) != name:
            raise DataError(
                f"{path}, row {row.number}: label {row.label!r} is called {name!r} here and "
                f"{names[row.label]!r} above; give it one name"
            )
    whole = all(_WHOLE.fullmatch(label) for label in names)
    order = sorted(names, key=int) if whole else sorted(names, key=natural_key)
    classes = check_classes(order, [names[label] for label in order], str(path))
    return classes, {label: number for number, label in enumerate(order)}


def _csv(path: Path, required: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and cells of each row of a CSV table."""
    reader = csv.reader(io.StringIO(read_list(path, "table"), newline=""), strict=True)
    try:
        header = [cell.strip().lower() for cell in next(reader, [])]
        _check_header(header, path, required)
        for cells in reader:
            if not cells or cells == [""]:
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{path}, row {reader.line_num}: has {len(cells)} cells where the header has "
                    f"{len(header)}; quote cells that hold commas"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, row {reader.line_num}: is not valid CSV ({error})") from error


def _check_header(header: list[str], path: Path, required: tuple[str, ...]) -> None:
    missing = [column for column in required if column not in header]
    if missing:
        hint = "; separate columns by commas" if len(header) == 1 and re.search(r"[;\t]", header[0]) else ""
        raise DataError(f"{path}: has no column {' and no column '.join(missing)}{hint}")
    for column in REQUIRED + OPTIONAL:
        if header.count(column) > 1:
            raise DataError(f"{path}: has two columns called {column}; remove one")


def _jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and object of each line of a JSONL table."""
    for number, line in enumerate(read_list(path, "table").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, f"{path}, row {number}", "JSON object")
        except DearError as error:
            raise DataError(str(error)) from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, row {number}: is not a JSON object")
        yield number, record
