"""Says what of a benchmark is there, what is missing, and where the field gets it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dear.data.benchmarks import BENCHMARKS, find_benchmark, list_benchmark
from dear.data.layouts import Benchmark
from dear.errors import DataError, UsageError


@dataclass(frozen=True)
class DatasetCheck:
    """What a benchmark's folder holds.

    Attributes:
        name: the benchmark.
        home: its folder.
        present: files and folders that are there.
        missing: files and folders that are not, or what is wrong with them.
        classes: how many were found.
        expected_classes: how many were published.
        images: by split, how many are listed.
        absent: by split, how many of those are not there.
        source: where the field gets it.
    """

    name: str
    home: str
    present: tuple[str, ...]
    missing: tuple[str, ...]
    classes: int
    expected_classes: int
    images: dict[str, int]
    absent: dict[str, int]
    source: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        whole = self.classes == self.expected_classes
        return whole and not self.missing and not any(self.absent.values())

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**self.__dict__, "complete": self.complete}

    def __str__(self) -> str:
        lines = [f"{self.name} in {self.home}: {'complete' if self.complete else 'incomplete'}"]
        lines += [f"  there    {item}" for item in self.present]
        lines += [f"  missing  {item}" for item in self.missing]
        if self.images:
            lines.append(f"  classes  {self.classes} of {self.expected_classes}")
        for split, count in self.images.items():
            gone = f", {self.absent[split]} of them missing" if self.absent[split] else ""
            lines.append(f"  {split:8} {count} images{gone}")
        if not self.complete:
            lines += ["where the field gets it:", *(f"  {place}" for place in self.source)]
        return "\n".join(lines)


def check_dataset(name: str, root: str | os.PathLike[str]) -> DatasetCheck:
    """Look for a benchmark under `root`.

    Raises:
        UsageError: no such benchmark.
    """
    benchmark = find_benchmark(name)
    if benchmark is None:
        raise UsageError(f"{name}: no such benchmark; there are {', '.join(BENCHMARKS)}")
    home = Path(root) / benchmark.folder
    parts = _parts(benchmark)
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


def _parts(benchmark: Benchmark) -> list[str]:
    """Files and folders that a benchmark's folder must hold."""
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
