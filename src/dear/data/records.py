"""The rows of a table as mappings from column to value: CSV, JSONL, Parquet, COCO JSON, and frames.

`dear.data.table` interprets them. Where a table contains the images themselves, a reader of that column is
returned as well (`dear.data.stored`).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dear.data.inputs import is_missing
from dear.data.paths import read_list
from dear.data.stored import CellReader, ParquetCells, decode_cell
from dear.errors import DataError, DearError, InputError
from dear.images.arrays import from_array
from dear.utils.extras import missing_extra
from dear.utils.files import read_json
from dear.utils.schema import parse_json

REQUIRED = ("path", "label")
OPTIONAL = ("classname", "split", "domain", "group", "parent")
LISTS = ("labels", "texts")  #: columns of lists, or of texts separated by `;`
BOX = ("x", "y", "width", "height")
IMAGE = "image"  #: column of encoded images
KINDS = (".csv", ".jsonl", ".ndjson", ".parquet", ".json")  #: endings of tables

Record = Mapping[str, Any]


def read_records(
    path: Path, root: Path, required: tuple[str, ...] = REQUIRED
) -> tuple[Iterator[tuple[int, Record]], CellReader | None]:
    """Number and cells of each row, and the reader of the image column if there is one."""
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _read_jsonl(path), None
        case ".parquet":
            return _read_parquet(path, root, required)
        case ".json":
            return _read_coco(path), None
    return _read_csv(path, required), None


def frame_records(frame: Any) -> tuple[Iterator[tuple[int, Record]], CellReader | None]:
    """Rows of a pandas or polars frame; missing values are None."""
    if not hasattr(frame, "columns"):
        raise DataError(
            f"data must be a path, a name, or a frame with columns, got {type(frame).__name__}; for images "
            "and labels in lists use dear.Classifier().fit(images, labels)"
        )
    rows = frame.to_dicts() if hasattr(frame, "to_dicts") else frame.to_dict("records")
    records = [
        {str(key).lower(): None if is_missing(value) else value for key, value in row.items()} for row in rows
    ]
    cells = IMAGE in _lowercase(frame.columns) and "path" not in _lowercase(frame.columns)
    reader = _ListedCells([row.get(IMAGE) for row in records], "frame") if cells else None
    return iter(enumerate(records, 1)), reader


def _lowercase(names: Iterable[Any]) -> list[str]:
    return [str(name).lower() for name in names]


class _ListedCells:
    """Images of a frame, already in memory."""

    def __init__(self, values: Sequence[Any], where: str) -> None:
        self._values, self._source = values, where

    def read(self, row: int) -> bytes | str:
        value, where = self._values[row], f"{self._source}, row {row + 1}, column {IMAGE}"
        if isinstance(value, np.ndarray):
            value = from_array(value, where)
        if isinstance(value, Image.Image):
            content = io.BytesIO()
            value.save(content, "PNG")
            value = content.getvalue()
        return decode_cell(value, where, Path())


def _read_parquet(
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
            selected = [name for name in names if name.lower() in known]
            rows = file.read(columns=selected).to_pylist()
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({str(error).splitlines()[0]})") from None
    image = next((name for name in names if name.lower() == IMAGE), None)
    _check_header([name.lower() for name in selected] + ([IMAGE] if image else []), path, required)
    reader = None if image is None or "path" in _lowercase(selected) else ParquetCells(path, image, root)
    if reader is not None and rows:
        try:
            reader.read(0)
        except InputError as error:
            raise DataError(str(error)) from None
    return iter(
        [(number, {key.lower(): value for key, value in row.items()}) for number, row in enumerate(rows, 1)]
    ), reader


def _read_coco(path: Path) -> Iterator[tuple[int, Record]]:
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


def _read_csv(path: Path, required: tuple[str, ...]) -> Iterator[tuple[int, Record]]:
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
                    f"{len(header)}; quote cells that contain commas"
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


def _read_jsonl(path: Path) -> Iterator[tuple[int, Record]]:
    """Line number and object of each line of a JSONL table."""
    for number, line in enumerate(read_list(path, "table").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, f"{path}, row {number}", "JSON object")
        except DearError as error:
            raise DataError(str(error)) from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, row {number}: must be a JSON object, got {line[:40]!r}")
        yield number, record
