"""The images that `dear embed` reads, labeled or not, and what is known of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dear.data.batches import name_of
from dear.data.huggingface import is_dataset
from dear.data.images import TEMPLATE, ImageSet, ListedImages, label_text, unlabeled_images
from dear.data.inputs import as_images, is_frame
from dear.data.names import SPLITS, readable
from dear.data.open import open_data
from dear.data.records import BOX, IMAGE
from dear.data.stored import CellImages, ParquetCells
from dear.data.tars import is_tar, read_tars
from dear.errors import DataError, InputError
from dear.images.names import find_images
from dear.utils.digest import of_parts
from dear.utils.extras import missing_extra
from dear.utils.files import PathLike

if TYPE_CHECKING:
    import pyarrow as pa

#: columns of a table that are kept next to the features, and their names in the result
KEPT = {
    "label": "label",
    "labels": "label",
    "classname": "label",
    "split": "split",
    "domain": "domain",
    "group": "group",
}
Columns = Mapping[str, Sequence[str | None]]


@dataclass(frozen=True)
class Source:
    """Images, their names, and columns of what is known of them (label, split, …)."""

    images: ImageSet
    names: Sequence[str]
    columns: Columns = field(default_factory=dict)
    files: Sequence[str] = ()  #: the files that the images are read from: a changed one is another image

    @property
    def digest(self) -> str:
        """Hash of names, and of the files' sizes and times."""
        lines = [f"{name}\n" for name in self.names]
        for file in self.files:
            try:
                state = os.stat(file)
                stamp = f"{state.st_size} {state.st_mtime_ns}"
            except OSError:
                stamp = "missing"
            lines.append(f"{file}\n{stamp}\n")
        return of_parts(*lines).hex()


def open_source(data: PathLike | Sequence[Any] | ImageSet, root: PathLike | None = None) -> Source:
    """What `embed` takes: a path or name of images, labeled or not; images in a list; an image set."""
    if isinstance(data, ImageSet):
        return _labeled_source(data)
    if is_frame(data):
        return _labeled_source(open_data(data, "all", root=root))
    if not isinstance(data, str | os.PathLike):
        items = as_images(data)
        if all(isinstance(item, str | os.PathLike) for item in items):
            items = tuple(find_images([os.fspath(item) for item in items]))  # type: ignore[arg-type]
        return _list_source(items)
    path = Path(data).expanduser()
    if is_tar(path):
        return _tar_source(path)
    if path.suffix.lower() in (".csv", ".parquet"):
        names = _lower_column_names(path)
        if "path" in names and not set(BOX) & set(names):
            return _list_source(_table_paths(path, root), known_columns(path))
        if path.suffix.lower() == ".parquet" and IMAGE in names and "path" not in names:
            return _parquet_source(path, Path(root) if root is not None else path.parent)
        if "path" not in names:
            raise DataError(f"{path}: has no column path; it has {', '.join(names)}")
    elif os.path.isfile(path) and path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        return _list_source([os.fspath(data)])
    elif _is_folder(path):
        files = _folder_files(path)
        return _list_source(files, folder_columns(path, files))
    return _labeled_source(open_data(data, "all", root=root), str(data))


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder of images, not one that `datasets` saved."""
    return path.is_dir() and not is_dataset(str(path))


def _list_source(items: Sequence[Any], columns: Columns | None = None) -> Source:
    images = unlabeled_images(items)
    names = [name_of(item) for item in items]
    files = [os.fspath(item) for item in items if isinstance(item, str | os.PathLike)]
    return Source(images, names, columns or {}, files)


def _labeled_source(images: ImageSet, spec: str | None = None) -> Source:
    """The images of a set with the names of their classes."""
    places = range(len(images))
    labels = [label_text(images, place, ";") for place in places]
    if isinstance(images, ListedImages):
        names = [name_of(item) for item in images.items]
    else:
        path = getattr(images, "path", None)
        names = [str(path(place)) if callable(path) else images.key(place) for place in places]
    return Source(images, names, {"label": labels}, [spec] if spec is not None else [])


def _tar_source(path: Path) -> Source:
    reader, labels = read_tars(path)
    known = {"label": list(labels.values())} if any(label is not None for label in labels.values()) else {}
    files = [str(path)] if path.is_file() else sorted(str(file) for file in path.iterdir())
    return Source(_unlabeled_cells(reader, len(labels), path.stem), list(labels), known, files)


def _parquet_source(path: Path, root: Path) -> Source:
    reader = ParquetCells(path, next(n for n in _column_names(path) if n.lower() == IMAGE), root)
    images = _unlabeled_cells(reader, len(reader), path.stem)
    names = [images.key(place) for place in range(len(images))]
    return Source(images, names, known_columns(path), [str(path)])


def _unlabeled_cells(reader: Any, count: int, name: str) -> CellImages:
    labels = torch.zeros(count, dtype=torch.int64)
    return CellImages(name, ("image",), TEMPLATE, reader, tuple(range(count)), labels)


def _folder_files(path: Path) -> list[str]:
    try:
        return find_images([str(path)])
    except InputError as error:
        raise DataError(str(error)) from None


def folder_columns(path: Path, images: Sequence[str]) -> dict[str, list[str | None]]:
    """Label and split of the images of a folder, where they are known.

    Class folders are labels, and `train/`, `test/` and `val/` above them are splits.
    """
    split_names = {name: split for split, names in SPLITS.items() for name in names}
    labels: list[str | None] = []
    splits: list[str | None] = []
    for image in images:
        folders = list(Path(image).relative_to(path).parts[:-1])
        splits.append(split_names.get(folders[0].lower()) if folders else None)
        if splits[-1] is not None:
            folders.pop(0)
        labels.append(readable(folders[0]) if folders else None)
    columns = {"label": labels, "split": splits}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def known_columns(path: Path) -> dict[str, list[str | None]]:
    """Label, split, domain and group of a table, as texts."""
    table = _read_table(path, [name for name in _column_names(path) if name.lower() in KEPT])
    lower = {name.lower(): table.column(name).to_pylist() for name in table.column_names}
    columns = {new: lower[old] for old, new in KEPT.items() if old in lower}
    return {name: [_as_text(value) for value in values] for name, values in columns.items()}


def _as_text(value: Any) -> str | None:
    """The text of a cell; of a list of labels with `;` between."""
    if isinstance(value, list):
        return ";".join(map(str, value))
    return None if value is None else str(value)


def _table_paths(path: Path, root: PathLike | None) -> list[str]:
    """The column `path` of a table; relative paths start at `root` or the table's folder."""
    name = next(name for name in _column_names(path) if name.lower() == "path")
    values = _read_table(path, [name]).column(0).to_pylist()
    if not values:
        raise DataError(f"{path}: the table has no rows")
    return [os.path.join(path.parent if root is None else root, str(value)) for value in values]


def _lower_column_names(path: Path) -> list[str]:
    return [name.lower() for name in _column_names(path)]


def _column_names(path: Path) -> list[str]:
    """Columns of a table, as it writes them."""
    need_pyarrow()
    import pyarrow.csv
    import pyarrow.parquet

    try:
        if path.suffix.lower() == ".parquet":
            return list(pyarrow.parquet.read_schema(path).names)
        with pyarrow.csv.open_csv(path) as reader:
            return list(reader.schema.names)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from None


def _read_table(path: Path, columns: list[str]) -> pa.Table:
    import pyarrow.csv
    import pyarrow.parquet

    try:
        if path.suffix.lower() == ".parquet":
            return pyarrow.parquet.read_table(path, columns=columns)
        # As texts: "007" is a name, not a number. An empty cell is null.
        options = pyarrow.csv.ConvertOptions(
            include_columns=columns,
            column_types=dict.fromkeys(columns, pyarrow.string()),
            strings_can_be_null=True,
            null_values=[""],
        )
        return pyarrow.csv.read_csv(path, convert_options=options)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from None


def need_pyarrow() -> None:
    """Raise a UsageError with the extra to install where pyarrow is missing."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise missing_extra("Parquet", "parquet") from None
