"""A table of images: CSV, JSONL, Parquet, a pandas or polars frame, or COCO JSON.

Columns: `path` (absolute, or relative to the table's folder or `root`) or, in Parquet and frames, an `image`
column (bytes, or structs of bytes and path); `label`, or `labels` for several (a list, or a text with `;`
between; `;` alone or an empty list: none of the classes); optionally `classname`, `split`, `domain`, `group`
(another attribute, for accuracy in the worst group), `texts` (of the row's class, as `labels`;
`dear.data.texts`), `parent` (of the row's class in a tree; `dear.data.tree`), and `x,y,width,height` for a
box (pixels or fractions).
Without `classname`, labels are class names and are read like folder names (`golden_retriever` is "golden
retriever"); with it, `label` may be a number. Classes are in the order of their labels: by value if all are
whole numbers, otherwise in natural order. Rows with an empty label are unlabeled images
(`dear.data.unlabeled`). Other columns are ignored.

No image (or box) may occur twice: it could be trained on and tested, or have two labels. Without a `split`
column, a fifth of each class (and domain) is held out for testing by the hash of the path. `confined` tables,
which come from strangers, may not leave their folder, neither by `..` nor by a link.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dear.data.images import (
    TEMPLATE,
    UNLABELED,
    FileImages,
    ImageSet,
    check_classes,
    check_template,
    main_labels,
    natural_key,
    readable,
    spaced,
)
from dear.data.paths import Anywhere, Inside, read_list
from dear.data.shots import pick_split
from dear.data.stored import Box, BoxedImages, CellImages, CellReader, ParquetCells, decode_cell
from dear.data.texts import check_texts
from dear.data.tree import SEPARATOR as TREE
from dear.data.tree import add_path, resolve_tree
from dear.errors import DataError, DearError, InputError
from dear.images.arrays import from_array
from dear.utils.extras import missing_extra
from dear.utils.files import read_json
from dear.utils.text import check_name, parse_json

REQUIRED = ("path", "label")
OPTIONAL = ("classname", "split", "domain", "group", "parent")
LISTS = ("labels", "texts")  #: columns of lists, or of texts with `;` between
BOX = ("x", "y", "width", "height")
IMAGE = "image"  #: column of encoded images
KINDS = (".csv", ".jsonl", ".ndjson", ".parquet", ".json")  #: endings of tables
_WHOLE = re.compile(r"-?[0-9]{1,18}")

Record = Mapping[str, Any]


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
    def every(self) -> tuple[str, ...]:
        """All labels."""
        return (self.label,) if self.labels is None else self.labels

    @property
    def key(self) -> str:
        """What the row shows, for splits."""
        path = f"row {self.number}" if self.path is None else self.path
        return path if self.box is None else f"{path}#{self.box.text}"


class _Paths(Protocol):
    def check(self, path: str, where: str) -> str:
        """The path in plain form."""


def open_table(
    path: str | os.PathLike[str] | Any,
    split: str,
    template: str | None = None,
    name: str | None = None,
    root: str | os.PathLike[str] | None = None,
    *,
    confined: bool = False,
    margin: float = 0.0,
) -> ImageSet:
    """Read a table.

    Args:
        path: a CSV, JSONL, Parquet, or COCO JSON file, or a pandas or polars frame.
        split: a value of the `split` column, or "all".
        template: prompt with `{}` (default "a photo of a {}.").
        name: of the dataset (default: the table's name; of an `index.csv` its folder's).
        root: the folder that relative paths start from (default: the table's).
        confined: reject paths that leave `root`.
        margin: added to every box on each side, as a fraction of the box.

    Raises:
        DataError: a row is malformed; it is named, with its column.
    """
    frame = None if isinstance(path, str | os.PathLike) else path
    place = Path("frame" if frame is not None else path)
    folder = Path(root) if root is not None else (Path() if frame is not None else place.parent)
    records, reader = _frame(frame) if frame is not None else _records(place, folder)
    paths: _Paths = Inside(folder) if confined else Anywhere(folder)
    required = REQUIRED if reader is None else ("label",)
    rows = _rows(records, str(place), paths, required, margin=margin)
    rows = [row for row in rows if row.label or row.labels is not None]
    if not any(row.every for row in rows):
        raise DataError(f"{place}: no row has a label; a dataset needs some")
    classes, labels = _classes(rows, place)
    targets = None if rows[0].labels is None else _targets(rows, labels)
    main = torch.tensor([labels[row.label] for row in rows]) if targets is None else main_labels(targets)
    if rows[0].split is None:
        groups = [(label, row.domain) for label, row in zip(main.tolist(), rows, strict=True)]
        first: dict[str, int] = {}  # image -> its first row: all boxes of an image are on one side
        for index, row in enumerate(rows):
            first.setdefault(row.path or row.key, index)
        keys, searched = list(first), folder if reader is None else None
        picked = pick_split(keys, [groups[index] for index in first.values()], split, str(place), searched)
        images = {keys[index] for index in picked}
        chosen = [index for index, row in enumerate(rows) if (row.path or row.key) in images]
    else:
        chosen = [index for index, row in enumerate(rows) if split in ("all", row.split)]
        if not chosen:
            there = ", ".join(sorted({row.split or "" for row in rows}))
            raise DataError(f"{place}: has no rows of split {split!r}; it has {there}")
    taken = [rows[index] for index in chosen]
    common: dict[str, Any] = {
        "name": name or (place.resolve().parent.name if place.stem == "index" else place.stem),
        "classes": classes,
        "template": check_template(TEMPLATE if template is None else template),
        "labels": main[chosen],
        "targets": None if targets is None else targets[chosen],
        "texts": _texts(rows, classes, labels, place),
        "parents": _parents(rows, classes, labels, place),
        "domains": None if rows[0].domain is None else tuple(row.domain or "" for row in taken),
        "groups": None if rows[0].group is None else tuple(row.group or "" for row in taken),
    }
    return _image_set(taken, reader, folder, place, common)


def open_unlabeled_table(
    path: Path, root: Path, *, labeled_too: bool = False, margin: float = 0.0
) -> ImageSet | None:
    """The images of a table that have no label, or with `labeled_too` all of them, as images without labels.

    Returns:
        None where no row is without a label.

    Raises:
        DataError: a row is malformed; it is named, with its column.
    """
    records, reader = _records(path, root, ("path",) if labeled_too else REQUIRED)
    required = () if labeled_too else ("label",)
    rows = _rows(
        records, str(path), Anywhere(root), required if reader else ("path", *required), margin=margin
    )
    taken = rows if labeled_too else [row for row in rows if not row.label and row.labels is None]
    labels = torch.full((len(taken),), UNLABELED, dtype=torch.int64)
    common = {"name": path.name, "classes": (), "template": TEMPLATE, "labels": labels}
    return _image_set(taken, reader, root, path, common) if taken else None


def _image_set(
    rows: Sequence[Row], reader: CellReader | None, folder: Path, place: Path, common: Mapping[str, Any]
) -> ImageSet:
    """The images of some rows: cells, whole files, or boxes of files."""
    if reader is not None:
        return CellImages(reader=reader, rows=tuple(row.number - 1 for row in rows), **common)
    files = tuple(row.path or "" for row in rows)
    if not rows or rows[0].box is None:  # the held-out part of few images is empty
        return FileImages(root=folder, paths=files, **common)
    boxes = tuple(row.box or Box(0, 0, 1, 1) for row in rows)
    places = tuple(f"{place}, row {row.number}" for row in rows)
    return BoxedImages(root=folder, files=files, boxes=boxes, places=places, **common)


def _records(
    path: Path, root: Path, required: tuple[str, ...] = REQUIRED
) -> tuple[Iterator[tuple[int, Record]], CellReader | None]:
    """Number and cells of each row, and what reads the image column where there is one."""
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _jsonl(path), None
        case ".parquet":
            return _parquet(path, root, required)
        case ".json":
            return _coco(path), None
    return _csv(path, required), None


def _rows(
    records: Iterable[tuple[int, Record]],
    place: str,
    paths: _Paths,
    required: tuple[str, ...] = REQUIRED,
    *,
    margin: float = 0.0,
) -> list[Row]:
    """Every row, checked; the label of an unlabeled image is ""."""
    rows: list[Row] = []
    first: dict[str, int] = {}
    columns: frozenset[str] | None = None
    for number, cells in records:
        where = f"{place}, row {number}"
        record = dict(cells)
        several = "labels" in record
        if several and "label" in record:
            raise DataError(f"{where}: has a label and labels; keep one of the columns")
        listed = {key: _list(record[key], key, where) for key in LISTS if key in record}
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
            odd = sorted(present ^ columns)[0]
            raise DataError(f"{where}: some rows have {odd!r} and others do not; fill it in all or in none")
        columns = present
        texts = {key: _cell(record[key], key, where) for key in sorted(present - {*BOX, *LISTS})}
        box = _box(record, present, where, margin)
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
        raise DataError(f"{place}: the table has no rows")
    return _whole_pixels(rows)


def _whole_pixels(rows: list[Row]) -> list[Row]:
    """Rows whose boxes of whole numbers are pixels where any box is: 0,0,1,1 may be a pixel or the image."""
    if not any(row.box is not None and not row.box.fractional for row in rows):
        return rows
    return [row if row.box is None else replace(row, box=row.box.in_pixels()) for row in rows]


def _list(value: Any, column: str, where: str) -> tuple[str, ...] | None:
    """The items of a cell, each once: a list, or a text with `;` between; None: the cell is empty."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    items = value.split(";") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise DataError(f"{where}: {column} must be a list or a text with ; between, got {value!r}")
    whole = [str(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in items]
    odd = [item for item in whole if not isinstance(item, str)]
    if odd:
        raise DataError(f"{where}: {column} must hold texts, got {odd[0]!r}")
    return tuple(dict.fromkeys(text for item in whole if (text := str(item).strip())))


def _targets(rows: list[Row], labels: dict[str, int]) -> Tensor:
    """Which classes each row has, bool [n, C]."""
    targets = torch.zeros(len(rows), len(set(labels.values())), dtype=torch.bool)
    for place, row in enumerate(rows):
        targets[place, [labels[label] for label in row.every]] = True
    return targets


def _texts(
    rows: list[Row], classes: tuple[str, ...], labels: dict[str, int], place: Path
) -> dict[str, tuple[str, ...]] | None:
    """The different texts of each class's rows; None where the table has no texts."""
    texts: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.texts and row.labels is not None:
            raise DataError(
                f"{place}, row {row.number}, column texts: a row with several labels has no texts"
            )
        for text in row.texts:
            texts.setdefault(classes[labels[row.label]], {})[text] = None
    if not texts:
        return None
    missing = next((row for row in rows if classes[labels[row.label]] not in texts), None)
    if missing is not None:
        raise DataError(f"{place}, row {missing.number}, column texts: no text for {missing.label!r}")
    where = f"{place}, column texts"
    return {name: check_texts(list(some), name, where) for name, some in texts.items()}


def _parents(
    rows: list[Row], classes: tuple[str, ...], labels: dict[str, int], place: Path
) -> dict[str, str] | None:
    """The tree that the column `parent`, or labels that are paths, describe; None where there is none."""
    parents: dict[str, str] = {}
    paths = all(TREE in label.strip(TREE) for row in rows for label in row.every)
    for row in rows:
        where = f"{place}, row {row.number}"
        if row.parent is not None:
            if row.labels is not None:
                raise DataError(f"{where}, column parent: a row with several labels has no parent")
            add_path(parents, row.parent, classes[labels[row.label]], f"{where}, column parent")
        elif paths:
            for label in row.every:
                add_path(parents, label.rpartition(TREE)[0], classes[labels[label]], where)
    return (
        resolve_tree(parents, classes, f"{place}, column {'label' if paths else 'parent'}")
        if parents
        else None
    )


def _box(record: Record, present: frozenset[str], where: str, margin: float) -> Box | None:
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


def _cell(value: Any, column: str, where: str) -> str:
    """A cell as text: JSON may also give whole numbers as labels."""
    if isinstance(value, int) and not isinstance(value, bool) and column == "label":
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"{where}: {column} must be text, got {value!r}")
    if not value.strip() and column not in ("label", "parent"):
        raise DataError(f"{where}: {column} is empty; fill it or remove the row")
    return value if column == "path" else value.strip()


def _classes(rows: list[Row], path: Path) -> tuple[tuple[str, ...], dict[str, int]]:
    """Class names in order, and the number of each label."""
    names: dict[str, str] = {}
    paths = all(TREE in label.strip(TREE) for row in rows for label in row.every)
    labeled = [(row, label) for row in rows for label in row.every]
    for row, label in labeled:
        try:
            last = label.rpartition(TREE)[2] if paths else label
            name = readable(last) if row.classname is None else spaced(check_name(row.classname))
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
    whole = all(_WHOLE.fullmatch(label) for label in names)
    order = sorted(names, key=int) if whole else sorted(names, key=natural_key)
    classes = check_classes(order, [names[label] for label in order], str(path))
    return classes, {label: number for number, label in enumerate(order)}


def _frame(frame: Any) -> tuple[Iterator[tuple[int, Record]], CellReader | None]:
    """Rows of a pandas or polars frame; missing values are None."""
    if not hasattr(frame, "columns"):
        raise DataError(
            f"data must be a path, a name, or a frame with columns, got {type(frame).__name__}; for images "
            "and labels in lists use dear.Classifier().fit(images, labels)"
        )
    rows = frame.to_dicts() if hasattr(frame, "to_dicts") else frame.to_dict("records")
    records = [{str(key).lower(): _present(value) for key, value in row.items()} for row in rows]
    cells = IMAGE in _lower(frame.columns) and "path" not in _lower(frame.columns)
    reader = _ListedCells([row.get(IMAGE) for row in records], "frame") if cells else None
    return iter(enumerate(records, 1)), reader


def _present(value: Any) -> Any:
    """A value of a frame; None for NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _lower(names: Iterable[Any]) -> list[str]:
    return [str(name).lower() for name in names]


class _ListedCells:
    """Images of a frame, already in memory."""

    def __init__(self, values: Sequence[Any], place: str) -> None:
        self._values, self._place = values, place

    def read(self, row: int) -> bytes | str:
        value, place = self._values[row], f"{self._place}, row {row + 1}, column {IMAGE}"
        if isinstance(value, np.ndarray):
            value = from_array(value, place)
        if isinstance(value, Image.Image):
            content = io.BytesIO()
            value.save(content, "PNG")
            value = content.getvalue()
        return decode_cell(value, place, Path())


def _parquet(
    path: Path, root: Path, required: tuple[str, ...]
) -> tuple[Iterator[tuple[int, Record]], CellReader | None]:
    """Rows of a Parquet file without its image column, and the reader of that column."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise missing_extra("a Parquet table", "parquet") from None
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            known = ("path", "label", *OPTIONAL, *LISTS, *BOX)
            wanted = [name for name in names if name.lower() in known]
            rows = file.read(columns=wanted).to_pylist()
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({str(error).splitlines()[0]})") from None
    image = next((name for name in names if name.lower() == IMAGE), None)
    _check_header([name.lower() for name in wanted] + ([IMAGE] if image else []), path, required)
    reader = None if image is None or "path" in _lower(wanted) else ParquetCells(path, image, root)
    if reader is not None and rows:
        try:
            reader.read(0)
        except InputError as error:
            raise DataError(str(error)) from None
    return iter(
        [(number, {key.lower(): value for key, value in row.items()}) for number, row in enumerate(rows, 1)]
    ), reader


def _coco(path: Path) -> Iterator[tuple[int, Record]]:
    """Boxes of a COCO file: one row per annotation."""
    try:
        content = read_json(path, "COCO file")
        files = {image["id"]: image["file_name"] for image in content["images"]}
        names = {category["id"]: category["name"] for category in content["categories"]}
        annotations = content["annotations"]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{path}: is not a COCO file: it needs images, categories, and annotations ({error})"
        ) from None
    for number, annotation in enumerate(annotations, 1):
        where = f"{path}, annotation {number}"
        try:
            x, y, width, height = annotation["bbox"]
            image, category = annotation["image_id"], annotation["category_id"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: needs image_id, category_id, and bbox of four numbers ({error})"
            ) from None
        for key, value, known, listed in (
            ("image_id", image, files, "images"),
            ("category_id", category, names, "categories"),
        ):
            if not isinstance(value, int | str) or value not in known:
                raise DataError(f"{where}: {key} {value!r} is not in {listed}")
        yield (
            number,
            {
                "path": files[image],
                "label": names[category],
                "x": x,
                "y": y,
                "width": width,
                "height": height,
            },
        )


def _csv(path: Path, required: tuple[str, ...]) -> Iterator[tuple[int, Record]]:
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
            row = dict(zip(header, cells, strict=True))
            yield reader.line_num, {key: value for key, value in row.items() if value or key not in BOX}
    except csv.Error as error:
        raise DataError(f"{path}, row {reader.line_num}: is not valid CSV ({error})") from error


def _check_header(header: list[str], path: Path, required: tuple[str, ...]) -> None:
    missing = [column for column in required if column not in header]
    if "labels" in header:
        missing = [column for column in missing if column != "label"]
    if missing == ["path"] and IMAGE in header:
        missing = []
    if missing:
        hint = "; separate columns by commas" if len(header) == 1 and re.search(r"[;\t]", header[0]) else ""
        raise DataError(f"{path}: has no column {' and no column '.join(missing)}{hint}")
    if {"label", "labels"} <= set(header) and "label" in required:
        raise DataError(f"{path}: has the columns label and labels; keep label for one class per image")
    for column in ("path", "label", *OPTIONAL, *LISTS, *BOX):
        if header.count(column) > 1:
            raise DataError(f"{path}: has two columns called {column}; remove one")


def _jsonl(path: Path) -> Iterator[tuple[int, Record]]:
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
