"""WebDataset tars: `0001.jpg` with `0001.cls`, `0001.json` or `0001.txt`; images are read from the tar.

A sample is all members whose names agree up to the first dot of the file name. Its image is the member
with the ending of one; its label is the text of `.cls`, else `label`, `cls` or `class` of `.json`, else the
text of `.txt`. Tars are not trusted: links, devices, sparse files, names that leave the folder, and members
that end after the file are rejected before an image is read, and nothing is unpacked to disk.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import torch

from dear.data.images import TEMPLATE
from dear.data.names import check_classes, check_template, natural_key, readable
from dear.data.shots import pick_split
from dear.data.stored import CellImages
from dear.errors import DataError, DearError, InputError
from dear.images.names import is_image_name
from dear.utils.schema import parse_json
from dear.utils.text import check_printable

MAX_IMAGE = 256 << 20  #: bytes of an image
MAX_LABEL = 1 << 20  #: bytes of a label
_LABELS = ("cls", "json", "txt")  #: endings of labels, the first one counts
_KEYS = ("label", "cls", "class")  #: of a label in JSON


class TarCells:
    """Images of tars by number, read from their positions in the files."""

    def __init__(self, spans: Sequence[tuple[str, int, int]]) -> None:
        self._spans = spans  # file, first byte, bytes

    def read(self, row: int) -> bytes:
        """The bytes of one image."""
        path, start, size = self._spans[row]
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(size)


def is_tar(path: Path) -> bool:
    """Whether a path is a tar, or a folder of only tars and their indexes."""
    return bool(tar_files(path))


def tar_files(path: Path) -> list[Path]:
    """The tars of a path, in natural order; none if a folder contains anything else."""
    if path.suffix.lower() == ".tar":
        return [path]
    if not path.is_dir():
        return []
    files = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    if not all(file.suffix.lower() in (".tar", ".idx", ".json") and file.is_file() for file in files):
        return []
    return sorted(
        (file for file in files if file.suffix.lower() == ".tar"), key=lambda file: natural_key(file.name)
    )


def open_tars(
    path: Path, split: str = "all", template: str | None = None, name: str | None = None
) -> CellImages:
    """The images of a tar, or of a folder of tars, with their labels.

    Raises:
        DataError: a tar is damaged, contains other things than plain files, or some images have no label.
    """
    images, labels = read_tars(path)
    missing = next((key for key, label in labels.items() if label is None), None)
    if missing is not None:
        raise DataError(f"{path}: {missing} has no label; a sample needs .cls, .json or .txt")
    raw = sorted({label for label in labels.values() if label is not None}, key=natural_key)
    try:
        classes = check_classes(raw, [readable(label) for label in raw], str(path))
    except InputError as error:
        raise DataError(f"{path}: {error}") from None
    numbers = [raw.index(label) for label in labels.values() if label is not None]
    rows = pick_split(list(labels), numbers, split, str(path)) if split != "all" else range(len(numbers))
    return CellImages(
        name=name or path.stem,
        classes=classes,
        template=check_template(TEMPLATE if template is None else template),
        reader=images,
        rows=tuple(rows),
        labels=torch.tensor([numbers[row] for row in rows], dtype=torch.int64),
    )


def read_tars(path: Path) -> tuple[TarCells, dict[str, str | None]]:
    """The reader of the images of a tar or a folder of tars, and each image's label or None."""
    files = tar_files(path)
    spans: list[tuple[str, int, int]] = []
    labels: dict[str, str | None] = {}
    for file in files:
        prefix = f"{file.name}/" if len(files) > 1 else ""
        for image, (start, size, label) in _read_samples(file).items():
            spans.append((os.path.abspath(file), start, size))
            labels[f"{prefix}{image}"] = label
    if not spans:
        raise DataError(f"{path}: contains no images")
    return TarCells(spans), labels


def _read_samples(path: Path) -> dict[str, tuple[int, int, str | None]]:
    """By name of an image: first byte, size, and label."""
    images: dict[str, tuple[str, int, int]] = {}  # of a sample: name of the image, first byte, size
    labels: dict[str, dict[str, str]] = {}  # of a sample: texts by ending
    try:
        total = path.stat().st_size
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isdir():
                    continue
                key, ending = _key(member, path, total)
                if is_image_name(member.name):
                    if key in images:
                        raise DataError(
                            f"{path}: a sample must have one image, got {images[key][0]} and {member.name}"
                        )
                    _check_size(member, MAX_IMAGE, path)
                    images[key] = (member.name, member.offset_data, member.size)
                elif ending in _LABELS:
                    _check_size(member, MAX_LABEL, path)
                    labels.setdefault(key, {})[ending] = _read_text(tar, member, path)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise DataError(f"{path}: is not a complete, uncompressed tar ({error})") from None
    return {
        name: (start, size, _read_label(labels.get(key, {}), f"{path}, {key}"))
        for key, (name, start, size) in images.items()
    }


def _key(member: tarfile.TarInfo, path: Path, total: int) -> tuple[str, str]:
    """Key and ending of a member, which must be a plain file inside the tar."""
    name = member.name
    try:
        check_printable(name, "name of a member")
    except DearError as error:
        raise DataError(f"{path}: {error}") from None
    if not member.isreg() or member.issparse():
        raise DataError(
            f"{path}: members must be plain files, but {name} is a link, a device, or sparse; pack files only"
        )
    posix = PurePosixPath(name.replace("\\", "/"))
    if posix.is_absolute() or ".." in posix.parts:
        raise DataError(f"{path}: the name {name!r} leaves the tar; pack files with relative names")
    if member.offset_data + member.size > total:
        raise DataError(f"{path}: {name} ends after the file; the tar is truncated")
    stem, _, ending = posix.name.partition(".")
    return str(posix.parent / stem), ending.lower()


def _check_size(member: tarfile.TarInfo, limit: int, path: Path) -> None:
    if member.size > limit:
        raise DataError(
            f"{path}: a member must have at most {limit:,} bytes, but {member.name} has {member.size:,}"
        )


def _read_text(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> str:
    file = tar.extractfile(member)
    assert file is not None
    try:
        return file.read().decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path}: {member.name} is not UTF-8") from None


def _read_label(texts: dict[str, str], where: str) -> str | None:
    if "cls" in texts:
        return texts["cls"].strip() or None
    if "json" in texts:
        try:
            values = parse_json(texts["json"], where)
        except DearError as error:
            raise DataError(str(error)) from None
        value = (
            next((values[key] for key in _KEYS if key in values), None) if isinstance(values, dict) else None
        )
        if value is not None and not isinstance(value, str | int):
            raise DataError(f"{where}: the label in .json must be a text or a whole number, got {value!r}")
        if value is not None:
            return str(value).strip() or None
    return texts.get("txt", "").strip() or None
