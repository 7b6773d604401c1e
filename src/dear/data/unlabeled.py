"""Images without labels: a folder, a table or a dataset whose labels are not read, or part of a labeled one.

A labeled dataset may contain unlabeled images: those in a folder `unlabeled/` next to the class folders, and
rows of a table with an empty label.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dear.data.huggingface import is_dataset, open_unlabeled_dataset
from dear.data.images import TEMPLATE, UNLABELED, FileImages, ImageSet, ImageSetWrapper, unlabeled_images
from dear.data.inputs import as_images
from dear.data.names import SPLITS, natural_key
from dear.data.open import UNLABELED_FOLDER, WORLD, check_data, find_benchmark, open_data
from dear.data.records import KINDS
from dear.data.stored import CellImages
from dear.data.table import open_unlabeled_table
from dear.data.tars import is_tar, read_tars
from dear.errors import DataError
from dear.images.names import image_paths
from dear.images.views import Size

REST = "rest"  #: the name of the training images that are not drawn


@dataclass(frozen=True, eq=False)
class Relabeled(ImageSetWrapper):
    """The images of a set with other labels and classes."""

    images: ImageSet
    new_labels: Tensor  #: int64 [n], into `names`; -1: none
    names: tuple[str, ...]  #: of the classes

    @property
    def classes(self) -> tuple[str, ...]:
        """See `ImageSet`."""
        return self.names

    @property
    def labels(self) -> Tensor:
        """See `ImageSet`."""
        return self.new_labels

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """See `ImageSet`."""
        return self.images.pixels(indices, size)

    def subset(self, indices: Sequence[int]) -> Relabeled:
        """See `ImageSet`."""
        rows = torch.tensor([int(index) for index in indices], dtype=torch.int64)
        return Relabeled(self.images.subset(indices), self.new_labels[rows], self.names)

    def select_classes(self, names: Sequence[str]) -> ImageSet:
        """The images of some classes; labels count into `names`."""
        new_label_of = {name: number for number, name in enumerate(names)}
        new_label = torch.tensor([new_label_of.get(name, -1) for name in self.names], dtype=torch.int64)
        labels = torch.where(self.labels < 0, -1, new_label[self.labels])
        rows = (labels >= 0).nonzero()[:, 0]
        return Relabeled(self.images.subset(rows.tolist()), labels[rows], tuple(names))


def without_labels(images: ImageSet) -> Relabeled:
    """The images of a set without their labels."""
    return Relabeled(images, torch.full((len(images),), UNLABELED, dtype=torch.int64), ())


def rest_of(images: ImageSet, drawn: ImageSet) -> Relabeled:
    """The images of a set that are not drawn, without their labels.

    Raises:
        DataError: all images are drawn.
    """
    keys = {drawn.key(index) for index in range(len(drawn))}
    rest = [index for index in range(len(images)) if images.key(index) not in keys]
    if not rest:
        raise DataError(f"{images.name}: all {len(drawn)} images are drawn; unlabeled = 'rest' needs others")
    return without_labels(images.subset(rest))


def open_unlabeled(
    source: str | os.PathLike[str] | Sequence[Any], root: str | os.PathLike[str] | None = None
) -> ImageSet:
    """Images whose labels are not read.

    Args:
        source: a folder, of which all images at any depth count; a table with a column `path` or `image`; a
            tar or a folder of tars; a dataset, also of Hugging Face, of which the training images count; or a
            list of images, as in `as_images`.
        root: the folder of the benchmarks; for a table, the folder that its paths start from.

    Raises:
        DataError: there is no such source, or it holds no image.
    """
    if not isinstance(source, str | os.PathLike):
        items = as_images(source)
        if not items:
            raise DataError("unlabeled: the list of images must have at least 1 image, got none")
        return unlabeled_images(items)
    text = os.fspath(source)
    path = Path(text).expanduser()
    if text.startswith(WORLD) or (find_benchmark(text) is not None and root is not None):
        return without_labels(open_data(text, "train", root=root))
    if is_dataset(text):
        return open_unlabeled_dataset(text)
    check_data(path, root)
    if is_tar(path):
        reader, names = read_tars(path)
        labels = torch.full((len(names),), UNLABELED, dtype=torch.int64)
        return CellImages(path.stem, (), TEMPLATE, reader, tuple(range(len(names))), labels)
    if os.path.isdir(path):
        return _unlabeled_files(path, sorted(image_paths(path), key=natural_key))
    images = open_unlabeled_table(path, path.parent if root is None else Path(root), include_labeled=True)
    assert images is not None  # a table has at least one row
    return images


def unlabeled_part(
    source: str | os.PathLike[str], root: str | os.PathLike[str] | None = None, margin: float = 0.0
) -> ImageSet | None:
    """The unlabeled images of a labeled dataset; None if there are none.

    `margin` is added to every box of a table on each side, as a fraction of the box.

    Raises:
        DataError: a table cannot be read.
    """
    path = Path(os.fspath(source)).expanduser()
    if path.is_dir():
        folders = [path, *(path / name for name in SPLITS["train"])]
        rows = [
            (folder / UNLABELED_FOLDER / name).relative_to(path).as_posix()
            for folder in folders
            if (folder / UNLABELED_FOLDER).is_dir()
            for name in sorted(image_paths(folder / UNLABELED_FOLDER), key=natural_key)
        ]
        return _unlabeled_files(path, rows) if rows else None
    if path.suffix.lower() not in KINDS or not path.is_file():
        return None
    return open_unlabeled_table(path, path.parent if root is None else Path(root), margin=margin)


def _unlabeled_files(root: Path, paths: Sequence[str]) -> ImageSet:
    if not paths:
        raise DataError(f"{root}: must contain at least 1 unlabeled image, got none")
    labels = torch.full((len(paths),), UNLABELED, dtype=torch.int64)
    return FileImages(root.name, (), TEMPLATE, root, tuple(paths), labels)
