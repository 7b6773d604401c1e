"""A table of images: CSV, JSONL, Parquet, a pandas or polars frame, or COCO JSON.

Columns: `path` (absolute, or relative to the table's folder or `root`) or, in Parquet and frames, an `image`
column (bytes, or structs of bytes and path); `label`, or `labels` for several (a list, or a text separated
by `;`; `;` alone or an empty list: none of the classes); optionally `classname`, `split`, `domain`, `group`
(another attribute, for accuracy in the worst group), `texts` (of the row's class, as `labels`;
`dear.data.texts`), `parent` (of the row's class in a tree; `dear.data.tree`), and `x,y,width,height` for a
box (pixels or fractions).
Without `classname`, labels are class names and are read like folder names (`golden_retriever` is "golden
retriever"); with it, `label` may be a number. Classes are in the order of their labels: by value if all are
whole numbers, otherwise in natural order. Rows with an empty label are unlabeled images
(`dear.data.unlabeled`). Other columns are ignored.

No image (or box) may occur twice: it could be trained on and tested, or have two labels. Without a `split`
column, a fifth of each class (and domain) is held out for testing by the hash of the path.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dear.data.images import TEMPLATE, UNLABELED, FileImages, ImageSet, main_labels
from dear.data.names import check_classes, check_template, natural_key, readable, underscores_to_spaces
from dear.data.paths import UserPaths
from dear.data.records import BOX, LISTS, OPTIONAL, REQUIRED, Record, frame_records, read_records
from dear.data.shots import pick_split
from dear.data.stored import Box, BoxedImages, CellImages, CellReader
from dear.data.texts import check_texts
from dear.data.tree import SEPARATOR as TREE
from dear.data.tree import add_path, resolve_tree
from dear.errors import DataError, InputError
from dear.utils.text import check_name

_INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class Row:
    """One row of a table; columns that the table lacks are None."""

    number: int
    path: str | None
    label: str
    classname: str | None = None
    split: str | None = None
    domain: str | None = None
    group: str | None = None
    parent: str | None = None
    box: Box | None = None
    labels: tuple[str, ...] | None = None  #: of a table of several labels; None: the image is unlabeled
    texts: tuple[str, ...] = ()

    @property
    def all_labels(self) -> tuple[str, ...]:
        """All labels."""
        return (self.label,) if self.labels is None else self.labels

    @property
    def key(self) -> str:
        """A name of the row's image, for splits."""
        path = f"row {self.number}" if self.path is None else self.path
        return path if self.box is None else f"{path}#{self.box.text}"


def open_table(
    path: str | os.PathLike[str] | Any,
    split: str,
    template: str | None = None,
    name: str | None = None,
    root: str | os.PathLike[str] | None = None,
    margin: float = 0.0,
) -> ImageSet:
    """Read a table.

    Args:
        path: a CSV, JSONL, Parquet, or COCO JSON file, or a pandas or polars frame.
        split: a value of the `split` column, or "all".
        template: prompt with `{}` (default "a photo of a {}.").
        name: of the dataset (default: the table's name; of an `index.csv` its folder's).
        root: the folder that relative paths start from (default: the table's).
        margin: added to every box on each side, as a fraction of the box.

    Raises:
        DataError: a row is malformed; it is named, with its column.
    """
    frame = None if isinstance(path, str | os.PathLike) else path
    source = Path("frame" if frame is not None else path)
    folder = Path(root) if root is not None else (Path() if frame is not None else source.parent)
    records, reader = frame_records(frame) if frame is not None else read_records(source, folder)
    required = REQUIRED if reader is None else ("label",)
    rows = _parse_rows(records, str(source), UserPaths(folder), required, margin=margin)
    rows = [row for row in rows if row.label or row.labels is not None]
    if not any(row.all_labels for row in rows):
        raise DataError(f"{source}: no row has a label; a dataset needs some")
    classes, labels = _class_names(rows, source)
    targets = None if rows[0].labels is None else _targets(rows, labels)
    main = torch.tensor([labels[row.label] for row in rows]) if targets is None else main_labels(targets)
    if rows[0].split is None:
        groups = [(label, row.domain) for label, row in zip(main.tolist(), rows, strict=True)]
        first: dict[str, int] = {}  # image -> its first row: all boxes of an image are on one side
        for index, row in enumerate(rows):
            first.setdefault(row.path or row.key, index)
        keys, copies_root = list(first), folder if reader is None else None
        split_rows = pick_split(
            keys, [groups[index] for index in first.values()], split, str(source), copies_root
        )
        images = {keys[index] for index in split_rows}
        chosen = [index for index, row in enumerate(rows) if (row.path or row.key) in images]
    else:
        chosen = [index for index, row in enumerate(rows) if split in ("all", row.split)]
        if not chosen:
            present_splits = ", ".join(sorted({row.split or "" for row in rows}))
            raise DataError(f"{source}: has no rows of split {split!r}; it has {present_splits}")
    selected = [rows[index] for index in chosen]
    common: dict[str, Any] = {
        "name": name or (source.resolve().parent.name if source.stem == "index" else source.stem),
        "classes": classes,
        "template": check_template(TEMPLATE if template is None else template),
        "labels": main[chosen],
        "targets": None if targets is None else targets[chosen],
        "texts": _texts_of_classes(rows, classes, labels, source),
        "parents": _tree_of_classes(rows, classes, labels, source),
        "domains": None if rows[0].domain is None else tuple(row.domain or "" for row in selected),
        "groups": None if rows[0].group is None else tuple(row.group or "" for row in selected),
    }
    return _image_set(selected, reader, folder, source, common)


def open_unlabeled_table(
    path: Path, root: Path, *, include_labeled: bool = False, margin: float = 0.0
) -> ImageSet | None:
    """The images of a table without a label, or with `include_labeled` all of them, as images without labels.

    Returns:
        None where no row is without a label.

    Raises:
        DataError: a row is malformed; it is named, with its column.
    """
    records, reader = read_records(path, root, ("path",) if include_labeled else REQUIRED)
    required = () if include_labeled else ("label",)
    rows = _parse_rows(
        records, str(path), UserPaths(root), required if reader else ("path", *required), margin=margin
    )
    selected = rows if include_labeled else [row for row in rows if not row.label and row.labels is None]
    labels = torch.full((len(selected),), UNLABELED, dtype=torch.int64)
    common = {"name": path.name, "classes": (), "template": TEMPLATE, "labels": labels}
    return _image_set(selected, reader, root, path, common) if selected else None


def _image_set(
    rows: Sequence[Row], reader: CellReader | None, folder: Path, source: Path, common: Mapping[str, Any]
) -> ImageSet:
    """The images of some rows: cells, whole files, or boxes of files."""
    if reader is not None:
        return CellImages(reader=reader, rows=tuple(row.number - 1 for row in rows), **common)
    files = tuple(row.path or "" for row in rows)
    if not rows or rows[0].box is None:  # the held-out part of a few images is empty
        return FileImages(root=folder, paths=files, **common)
    boxes = tuple(row.box or Box(0, 0, 1, 1) for row in rows)
    origins = tuple(f"{source}, row {row.number}" for row in rows)
    return BoxedImages(root=folder, files=files, boxes=boxes, origins=origins, **common)


def _parse_rows(
    records: Iterable[tuple[int, Record]],
    source: str,
    paths: UserPaths,
    required: tuple[str, ...] = REQUIRED,
    *,
    margin: float = 0.0,
) -> list[Row]:
    """Every row, checked; the label of an unlabeled image is ""."""
    rows: list[Row] = []
    first: dict[str, int] = {}
    columns: frozenset[str] | None = None
    for number, cells in records:
        where = f"{source}, row {number}"
        record = dict(cells)
        several = "labels" in record
        if several and "label" in record:
            raise DataError(f"{where}: has a label and labels; keep one of the columns")
        listed = {key: _parse_list(record[key], key, where) for key in LISTS if key in record}
        if several:
            record["label"] = (listed["labels"] or ("",))[0]
        elif "label" not in required or ("label" in record and record["label"] is None):
            record["label"] = record.get("label") or ""
        present = frozenset(key for key in (*REQUIRED, *OPTIONAL, *BOX) if record.get(key) is not None)
        present |= {"labels"} if several else set()
        missing = [key for key in required if key not in present]
        if missing:
            raise DataError(f"{where}: has no {' and no '.join(missing)}")
        if columns is not None and present != columns:
            column = sorted(present ^ columns)[0]
            raise DataError(
                f"{where}: some rows have {column!r} and others do not; fill it in all or in none"
            )
        columns = present
        texts = {key: _parse_cell(record[key], key, where) for key in sorted(present - {*BOX, *LISTS})}
        box = _parse_box(record, present, where, margin)
        if "split" in texts:
            texts["split"] = texts["split"].lower()
        path = paths.check(texts["path"], where) if "path" in required else None
        texts.pop("path", None)
        labels = listed.get("labels")
        row = Row(number, path, box=box, labels=labels, texts=listed.get("texts") or (), **texts)
        if first.setdefault(row.key, number) != number:
            raise DataError(f"{where}: {row.key!r} is already in row {first[row.key]}; keep one")
        rows.append(row)
    if not rows:
        raise DataError(f"{source}: the table has no rows")
    return _unify_units(rows)


def _unify_units(rows: list[Row]) -> list[Row]:
    """Rows whose boxes of whole numbers are pixels if any box is: 0,0,1,1 may be a pixel or the image."""
    if not any(row.box is not None and not row.box.fractional for row in rows):
        return rows
    return [row if row.box is None else replace(row, box=row.box.in_pixels()) for row in rows]


def _parse_list(value: Any, column: str, where: str) -> tuple[str, ...] | None:
    """The distinct items of a cell, a list or a text separated by `;`; None if the cell is empty."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    items = value.split(";") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise DataError(f"{where}: {column} must be a list or a text separated by ;, got {value!r}")
    texts = [str(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in items]
    invalid = [item for item in texts if not isinstance(item, str)]
    if invalid:
        raise DataError(f"{where}: {column} must contain texts, got {invalid[0]!r}")
    return tuple(dict.fromkeys(text for item in texts if (text := str(item).strip())))


def _targets(rows: list[Row], labels: dict[str, int]) -> Tensor:
    """Which classes each row has, bool [n, C]."""
    targets = torch.zeros(len(rows), len(set(labels.values())), dtype=torch.bool)
    for number, row in enumerate(rows):
        targets[number, [labels[label] for label in row.all_labels]] = True
    return targets


def _texts_of_classes(
    rows: list[Row], classes: tuple[str, ...], labels: dict[str, int], source: Path
) -> dict[str, tuple[str, ...]] | None:
    """The different texts of each class's rows; None where the table has no texts."""
    texts: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.texts and row.labels is not None:
            raise DataError(
                f"{source}, row {row.number}, column texts: a row with several labels has no texts"
            )
        for text in row.texts:
            texts.setdefault(classes[labels[row.label]], {})[text] = None
    if not texts:
        return None
    missing = next((row for row in rows if classes[labels[row.label]] not in texts), None)
    if missing is not None:
        raise DataError(f"{source}, row {missing.number}, column texts: no text for {missing.label!r}")
    where = f"{source}, column texts"
    return {name: check_texts(list(entries), name, where) for name, entries in texts.items()}


def _tree_of_classes(
    rows: list[Row], classes: tuple[str, ...], labels: dict[str, int], source: Path
) -> dict[str, str] | None:
    """The tree that the column `parent`, or labels that are paths, describe; None where there is none."""
    parents: dict[str, str] = {}
    paths = all(TREE in label.strip(TREE) for row in rows for label in row.all_labels)
    for row in rows:
        where = f"{source}, row {row.number}"
        if row.parent is not None:
            if row.labels is not None:
                raise DataError(f"{where}, column parent: a row with several labels has no parent")
            add_path(parents, row.parent, classes[labels[row.label]], f"{where}, column parent")
        elif paths:
            for label in row.all_labels:
                add_path(parents, label.rpartition(TREE)[0], classes[labels[label]], where)
    return (
        resolve_tree(parents, classes, f"{source}, column {'label' if paths else 'parent'}")
        if parents
        else None
    )


def _parse_box(record: Record, present: frozenset[str], where: str, margin: float) -> Box | None:
    """The box of a row; None where the table has none."""
    if not present & set(BOX):
        return None
    values = []
    for column in BOX:
        try:
            value = float(record.get(column))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise DataError(f"{where}: {column} must be a number, got {record.get(column)!r}") from None
        if not math.isfinite(value) or value < 0 or (column in ("width", "height") and value == 0):
            raise DataError(
                f"{where}: {column} must be {'above' if column[0] in 'wh' else 'at least'} 0, got {value}"
            )
        values.append(value)
    x, y, width, height = values
    return Box(x, y, width, height, margin)


def _parse_cell(value: Any, column: str, where: str) -> str:
    """A cell as text; labels may also be whole numbers, which frames with missing labels hold as floats."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if column == "label" and is_number and value == value // 1:
        return str(int(value))
    if not isinstance(value, str):
        raise DataError(f"{where}: {column} must be text, got {value!r}")
    if not value.strip() and column not in ("label", "parent"):
        raise DataError(f"{where}: {column} is empty; fill it or remove the row")
    return value if column == "path" else value.strip()


def _class_names(rows: list[Row], path: Path) -> tuple[tuple[str, ...], dict[str, int]]:
    """Class names in order, and the number of each label."""
    names: dict[str, str] = {}
    paths = all(TREE in label.strip(TREE) for row in rows for label in row.all_labels)
    labeled = [(row, label) for row in rows for label in row.all_labels]
    for row, label in labeled:
        try:
            last = label.rpartition(TREE)[2] if paths else label
            name = (
                readable(last) if row.classname is None else underscores_to_spaces(check_name(row.classname))
            )
        except InputError as error:
            raise DataError(f"{path}, row {row.number}: {error}") from error
        if names.setdefault(label, name) != name:
            raise DataError(
                f"{path}, row {row.number}: label {label!r} is called {name!r} here and "
                f"{names[label]!r} above; give it one name"
            )
    for row, label in labeled:
        if ";" in label and any(part.strip() in names for part in label.split(";")):
            raise DataError(
                f"{path}, row {row.number}, column label: {label!r} names several classes; call the column "
                "labels"
            )
    numbers = all(_INTEGER.fullmatch(label) for label in names)
    order = sorted(names, key=int) if numbers else sorted(names, key=natural_key)
    classes = check_classes(order, [names[label] for label in order], str(path))
    return classes, {label: number for number, label in enumerate(order)}
