"""The content of a dataset: images per class, unreadable images, and missing files of a benchmark."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dear.data.images import ImageSet, targets_of
from dear.data.layouts import Benchmark
from dear.data.names import natural_key
from dear.data.open import BENCHMARKS, find_benchmark, list_benchmark, open_data, split_of_path
from dear.data.unlabeled import unlabeled_part
from dear.data.unreadable import check_images
from dear.errors import DataError, UsageError
from dear.images.names import other_paths
from dear.utils.text import format_count


def class_counts(images: ImageSet) -> dict[str, int]:
    """Images of each class, fewest first, classes without any included; every label of an image counts."""
    targets = targets_of(images)
    if targets is None:
        counts = torch.bincount(images.labels, minlength=len(images.classes))
    else:
        counts = targets.sum(dim=0)
    named = zip(images.classes, counts.tolist(), strict=True)
    return dict(sorted(named, key=lambda item: (item[1], natural_key(item[0]))))


def describe_balance(counts: dict[str, int], images: int) -> str:
    """The number of images per class, in one sentence.

    >>> describe_balance({"cat": 4, "dog": 4}, 8)
    '8 images of 2 classes, 4 per class'
    >>> describe_balance({"cat": 0, "dog": 2, "emu": 40}, 42)
    '42 images of 3 classes, from 0 to 40 per class; fewest: cat 0, dog 2, emu 40'
    """
    values = list(counts.values())
    start = f"{format_count(images, 'image')} of {format_count(len(values), 'class', 'classes')}, "
    if not values or values[0] == values[-1]:
        return f"{start}{values[0] if values else 0} per class"
    fewest = ", ".join(f"{name} {count}" for name, count in list(counts.items())[:5])
    return f"{start}from {values[0]} to {values[-1]} per class; fewest: {fewest}"


@dataclass(frozen=True)
class DatasetCheck:
    """The content of a benchmark's folder."""

    name: str  #: the benchmark
    home: str  #: its folder
    present: tuple[str, ...]  #: files and folders that exist
    missing: tuple[str, ...]  #: files and folders that do not exist, or problems with them
    classes: int  #: number of classes in the folder
    expected_classes: int  #: number of published classes
    images: dict[str, int]  #: number of listed images by split
    absent: dict[str, int]  #: number of listed images without a file, by split
    source: tuple[str, ...]  #: where to download it

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        has_all_classes = self.classes == self.expected_classes
        return has_all_classes and not self.missing and not any(self.absent.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**self.__dict__, "complete": self.complete}

    def __str__(self) -> str:
        lines = [f"{self.name} in {self.home}: {'complete' if self.complete else 'incomplete'}"]
        lines += [f"  present  {item}" for item in self.present]
        lines += [f"  missing  {item}" for item in self.missing]
        if self.images:
            lines.append(f"  classes  {self.classes} of {self.expected_classes}")
        for split, count in self.images.items():
            absent = f", {self.absent[split]} of them missing" if self.absent[split] else ""
            lines.append(f"  {split:8} {count} images{absent}")
        if not self.complete:
            lines += ["download:", *(f"  {address}" for address in self.source)]
        return "\n".join(lines)


@dataclass(frozen=True)
class SplitCheck:
    """The content of a folder, a table or a world task: images per class, and unusable files."""

    name: str
    images: dict[str, int]  #: by split; fewer than the counts where images have several labels
    counts: dict[str, dict[str, int]]  #: by split, images of each class; `val` only where it is separate
    unreadable: tuple[str, ...]  #: reasons why images cannot be read
    not_images: tuple[str, ...]  #: files of a folder whose names are not those of images
    unlabeled: int = 0  #: images without a label

    @property
    def complete(self) -> bool:
        """Whether every image can be read."""
        return not self.unreadable

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        splits = {
            split: {
                "images": self.images[split],
                "classes": len(counts),
                "fewest": min(counts.values(), default=0),
                "most": max(counts.values(), default=0),
                "per_class": counts,
            }
            for split, counts in self.counts.items()
        }
        unusable = {"unreadable": list(self.unreadable), "not_images": list(self.not_images)}
        return {"data": self.name, "splits": splits, "unlabeled": self.unlabeled, **unusable}

    def __str__(self) -> str:
        lines = []
        for split, counts in self.counts.items():
            unused = "; not used by training" if split == "val" else ""
            lines.append(f"{split}: {describe_balance(counts, self.images[split])}{unused}")
        if self.unlabeled:
            lines.append(
                f"unlabeled: {format_count(self.unlabeled, 'image')}; training uses them if they help"
            )
        lines += [f"unreadable: {reason}" for reason in self.unreadable]
        if self.not_images:
            more = f" and {len(self.not_images) - 5} more" if len(self.not_images) > 5 else ""
            names = ", ".join(self.not_images[:5])
            lines.append(f"not used, because the name is not that of an image: {names}{more}")
        return "\n".join(lines)


def check_splits(name: str, root: str | None = None) -> SplitCheck:
    """Read every image of a folder, a table or a world task, and count those of each class.

    Args:
        name: what `open_data` takes.
        root: the folder that relative paths of a table start from.

    Raises:
        DataError: it cannot be opened.
    """
    split = split_of_path(name)
    splits = ("train", "test") if split is None else (split,)
    sets = {split: open_data(name, split, root=root) for split in splits}
    with suppress(DataError):  # there is none
        val = open_data(name, "val", root=root)
        if split is None and _keys(val) != _keys(sets["test"]):
            sets["val"] = val
    unlabeled = unlabeled_part(name, root)
    every = [*sets.values()] if unlabeled is None else [*sets.values(), unlabeled]
    return SplitCheck(
        name,
        {split: len(images) for split, images in sets.items()},
        {split: class_counts(images) for split, images in sets.items()},
        tuple(item.reason for images in every for item in check_images(images, "skip").unreadable),
        tuple(other_paths(Path(name))) if Path(name).is_dir() else (),
        0 if unlabeled is None else len(unlabeled),
    )


def _keys(images: ImageSet) -> list[str]:
    return [images.key(index) for index in range(len(images))]


def check_dataset(name: str, root: str | os.PathLike[str]) -> DatasetCheck:
    """Check the folder of a benchmark below `root`."""
    benchmark = find_benchmark(name)
    if benchmark is None:
        raise UsageError(f"{name}: no such benchmark; choose from {', '.join(BENCHMARKS)}")
    home = Path(root) / benchmark.folder
    parts = _required_parts(benchmark)
    present = tuple(part for part in parts if (home / part).exists())
    missing = [part for part in parts if part not in present]
    if "classnames.txt" in missing and (home.parent / "imagenet" / "classnames.txt").is_file():
        missing.remove("classnames.txt")
    images: dict[str, int] = {}
    absent: dict[str, int] = {}
    classes = 0
    try:
        listing = list_benchmark(benchmark, Path(root))
    except DataError as error:
        if not missing:
            missing.append(str(error))
    else:
        classes = len(listing.classes)
        for split, rows in listing.splits.items():
            images[split] = len(rows)
            absent[split] = sum(not (listing.root / path).is_file() for path, _ in rows)
        if listing.domains is not None:
            images = dict(Counter(listing.domains.values()))
            absent = dict.fromkeys(images, 0)
    return DatasetCheck(
        name=benchmark.name,
        home=str(home),
        present=present,
        missing=tuple(missing),
        classes=classes,
        expected_classes=benchmark.classes,
        images=images,
        absent=absent,
        source=benchmark.source,
    )


def _required_parts(benchmark: Benchmark) -> list[str]:
    """Files and folders that a benchmark's folder must contain."""
    match benchmark.kind:
        case "split":
            return [part for part in (benchmark.split, benchmark.images) if part]
        case "imagenet":
            return ["classnames.txt", f"{benchmark.images}/train", f"{benchmark.images}/val"]
        case "imagenet-test":
            return ["classnames.txt", benchmark.images]
        case "aircraft":
            lists = [f"images_variant_{split}.txt" for split in ("train", "val", "test")]
            return [benchmark.images, "variants.txt", *lists]
        case "waterbirds":
            return ["metadata.csv"]
        case "celeba":
            return [benchmark.images]
        case _:
            return list(benchmark.domains)
