"""Images that are not whole files: boxes of files, and cells of Parquet tables or saved `datasets` folders.

Both are image sets like any other: decoded when needed, with stable keys and a digest of their content, so
that splits, caches, and checks treat them like files.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from PIL import Image
from torch import Tensor

from dear.data.content import file_digest
from dear.data.images import BaseImageSet, DataSource
from dear.errors import InputError
from dear.images.open import open_image
from dear.images.views import Size, read_views
from dear.utils.digest import of_parts

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_CACHED_BYTES = 1 << 30  # encoded images of row groups that stay in memory


@dataclass(frozen=True)
class Box:
    """A rectangle of an image: left, top, width, height; in pixels, or as fractions of the image."""

    x: float
    y: float
    width: float
    height: float
    margin: float = 0.0  #: added on every side, as a fraction of the box
    pixels: bool = False  #: the numbers are pixels, even if all are at most 1

    @property
    def fractional(self) -> bool:
        """Whether the numbers are fractions of the image: all at most 1."""
        return not self.pixels and max(self.x + self.width, self.y + self.height) <= 1.0

    def in_pixels(self) -> Box:
        """The box in a table of pixels, where whole numbers are pixels."""
        values = (self.x, self.y, self.width, self.height)
        return replace(self, pixels=all(value.is_integer() for value in values))

    def corners(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, right, bottom in pixels of an image of this size; the margin is cut at the image's edge.

        Raises:
            ValueError: the box is not inside the image.

        >>> Box(10, 0, 30, 20).corners(40, 20), Box(0.25, 0, 0.5, 1).corners(40, 20)
        ((10, 0, 40, 20), (10, 0, 30, 20))
        """
        across, down = (width, height) if self.fractional else (1, 1)
        left, top = self.x * across, self.y * down
        right, bottom = left + self.width * across, top + self.height * down
        if (
            self.width <= 0
            or self.height <= 0
            or left < 0
            or top < 0
            or right > width + 0.5
            or bottom > height + 0.5
        ):
            raise ValueError(f"the box {self.text} must be inside the image of {width} x {height} pixels")
        wider, higher = self.margin * (right - left), self.margin * (bottom - top)
        return (
            max(0, round(left - wider)),
            max(0, round(top - higher)),
            min(width, max(round(left) + 1, round(right + wider))),
            min(height, max(round(top) + 1, round(bottom + higher))),
        )

    @property
    def text(self) -> str:
        """The numbers, for keys and messages."""
        return ",".join(f"{value:g}" for value in (self.x, self.y, self.width, self.height))


@dataclass(frozen=True, eq=False, repr=False)
class BoxedImages(BaseImageSet):
    """Boxes of image files as images."""

    per_image: ClassVar[tuple[str, ...]] = ("files", "boxes", "origins")
    name: str  #: of the dataset
    classes: tuple[str, ...]  #: readable names, one per label
    template: str  #: prompt with `{}`
    root: Path  #: the folder of relative files
    files: tuple[str, ...]  #: one per box
    boxes: tuple[Box, ...]
    origins: tuple[str, ...]  #: where each box was read, for messages ("boxes.csv, row 7")
    labels: Tensor  #: int64 [n]
    domains: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    source: DataSource | None = None
    targets: Tensor | None = None
    texts: Mapping[str, Sequence[str]] | None = None
    parents: Mapping[str, str] | None = None

    def image(self, index: int) -> Image.Image:
        """The box of the upright image, RGB."""
        image = open_image(self.root / self.files[index])
        try:
            return image.crop(self.boxes[index].corners(*image.size))
        except ValueError as error:
            raise InputError(f"{self.origins[index]}: {error}") from None

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """CLIP's view of some boxes, uint8 [b, 3, size, size]."""
        return read_views([self.image(int(index)) for index in indices], size)

    def key(self, index: int) -> str:
        """File and box."""
        return f"{self.files[index]}#{self.boxes[index].text}"

    def digest(self, index: int) -> bytes:
        """Hash of the file's bytes and the box."""
        box = self.boxes[index]
        file = file_digest(self.root / self.files[index])
        return of_parts(file, f"{box.text} {box.margin:g} {'fractions' if box.fractional else 'pixels'}")


class CellReader(Protocol):
    """Encoded images by row number."""

    def read(self, row: int) -> bytes | str:
        """The bytes of an image file, or its path."""


@dataclass(frozen=True, eq=False, repr=False)
class CellImages(BaseImageSet):
    """Images in the cells of a table, read when they are needed."""

    per_image: ClassVar[tuple[str, ...]] = ("rows",)
    name: str
    classes: tuple[str, ...]
    template: str
    reader: CellReader
    rows: tuple[int, ...]  #: row of each image in the table, from 0
    labels: Tensor  #: int64 [n]
    domains: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    source: DataSource | None = None
    targets: Tensor | None = None
    texts: Mapping[str, Sequence[str]] | None = None
    parents: Mapping[str, str] | None = None

    def cell(self, index: int) -> bytes | str:
        """The bytes of an image file, or its path."""
        return self.reader.read(self.rows[index])

    def image(self, index: int) -> Image.Image:
        """A whole image, RGB, upright."""
        try:
            return open_image(self.cell(index))
        except InputError as error:
            raise InputError(f"{self.name}, row {self.rows[index] + 1}: {error}") from None

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """CLIP's view of some images, uint8 [b, 3, size, size]."""
        return read_views([self.cell(int(index)) for index in indices], size)

    def key(self, index: int) -> str:
        """The row of the table."""
        return f"row {self.rows[index]}"

    def digest(self, index: int) -> bytes:
        """Hash of the encoded image."""
        cell = self.cell(index)
        return file_digest(cell) if isinstance(cell, str) else of_parts(cell)


class ParquetCells:
    """The image column of a Parquet file: bytes, paths, or Hugging Face's structs of bytes and path.

    Row groups are read when one of their rows is needed and cached up to a limit of bytes.
    """

    def __init__(self, path: Path, column: str, root: Path) -> None:
        self.path, self.column, self.root = path, column, root
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, list[Any]] = OrderedDict()
        self._bytes = 0
        with self._open() as file:
            counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        self._starts = list(accumulate(counts, initial=0))

    def __reduce__(self) -> tuple[Any, ...]:  # for workers: neither the lock nor the cached groups are sent
        return ParquetCells, (self.path, self.column, self.root)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, row: int) -> bytes | str:
        """The bytes or the path of one row."""
        group = bisect_right(self._starts, row) - 1
        with self._lock:
            if group not in self._groups:
                self._groups[group] = self._read_group(group)
                self._bytes += _size(self._groups[group])
                while self._bytes > _CACHED_BYTES and len(self._groups) > 1:
                    self._bytes -= _size(self._groups.popitem(last=False)[1])
            self._groups.move_to_end(group)
            value = self._groups[group][row - self._starts[group]]
        return decode_cell(value, f"{self.path}, row {row + 1}, column {self.column}", self.root)

    def _open(self) -> ParquetFile:
        from pyarrow.parquet import ParquetFile

        return ParquetFile(self.path)

    def _read_group(self, group: int) -> list[Any]:
        with self._open() as file:
            column: list[Any] = file.read_row_group(group, columns=[self.column]).column(0).to_pylist()
        return column


class DatasetCells:
    """The image column of several tables of `datasets`, whose rows are counted from one to the next."""

    def __init__(self, tables: Iterable[Any], column: str, where: str) -> None:
        import datasets

        encoded = datasets.Image(decode=False)
        self._tables = [
            table.cast_column(column, encoded) if column in table.column_names else table for table in tables
        ]
        self._starts = list(accumulate(map(len, self._tables), initial=0))
        self._column, self._source = column, where

    def read(self, row: int) -> bytes | str:
        """The bytes or the path of one row."""
        number = bisect_right(self._starts, row) - 1
        value = self._tables[number][row - self._starts[number]][self._column]
        return decode_cell(value, f"{self._source}, row {row + 1}, column {self._column}", Path())


def decode_cell(value: Any, where: str, root: Path) -> bytes | str:
    """The bytes or the path of a cell: bytes, a path, or a struct with `bytes` and `path`.

    Raises:
        InputError: the cell holds no image.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, str) and value:
        return str(root / value)
    raise InputError(
        f"{where}: an image must be bytes, a path, or a struct of both, got {type(value).__name__}"
    )


def _size(values: list[Any]) -> int:
    encoded = (value.get("bytes") if isinstance(value, dict) else value for value in values)
    return sum(len(value) for value in encoded if isinstance(value, bytes))
