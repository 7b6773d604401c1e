"""The field's benchmarks in their usual folders: CoOp's fifteen, DomainBed's five, two with known groups.

Where each lies, its split file, template and class count are data (`benchmarks.json`); each kind is read by a
function of `layouts`:

- `split`: `split_zhou_*.json`, three lists of [path, label, class name];
- `imagenet`: folders by WordNet id under `train` and `val` (the test split), names in `classnames.txt`;
- `imagenet-test`: ImageNet's variants, test split only; A and R have their own 200 of the classes;
- `aircraft`: lists of `image class` by split, classes in `variants.txt`;
- `domains`: `domain/class/image`; no split is published, a fifth of each class of each domain is held out;
- `waterbirds`, `celeba`: images with a known value beside the class; see `grouped`.

Underscores in class names are read as spaces, and nothing else is changed, as the field does.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dear._io.files import read_json
from dear._io.printable import check_name
from dear.data.images import FileImages
from dear.data.layouts import COOP, READERS, Benchmark, Listing
from dear.data.names import check_template
from dear.data.shots import pick_split
from dear.errors import DataError, InputError, UsageError

DOMAINBED = "python -m domainbed.scripts.download (https://github.com/facebookresearch/DomainBed)"


def _load() -> dict[str, Benchmark]:
    table = read_json(Path(__file__).with_name("benchmarks.json"), "table of benchmarks")
    result = {}
    for name, entry in table.items():
        source = entry.pop("source", [DOMAINBED])
        if "split" in entry:
            source.append(f"{entry['split']}: linked from {COOP}")
        domains = tuple(entry.pop("domains", ()))
        result[name] = Benchmark(name=name, domains=domains, source=tuple(source), **entry)
    return result


BENCHMARKS = _load()


def find_benchmark(name: str) -> Benchmark | None:
    """A benchmark by its name, whatever the case.

    >>> find_benchmark("oxfordpets").folder
    'oxford_pets'
    """
    return next((known for known in BENCHMARKS.values() if known.name.casefold() == name.casefold()), None)


def open_benchmark(
    name: str, split: str, root: str | os.PathLike[str], template: str | None = None
) -> FileImages:
    """One split of a benchmark.

    Args:
        name: one of `BENCHMARKS`.
        split: "train", "val" or "test" as published, or "all".
        root: the folder that holds the benchmark's folder.
        template: instead of the benchmark's own.

    Raises:
        DataError: a file is missing or malformed, or a path leaves the folder.
        UsageError: no such benchmark.
    """
    benchmark = find_benchmark(name)
    if benchmark is None:
        raise UsageError(f"{name}: no such benchmark; there are {', '.join(BENCHMARKS)}")
    listing = list_benchmark(benchmark, Path(root))
    rows = _pick(benchmark, listing, split)
    domains = listing.domains
    return FileImages(
        name=benchmark.name,
        classes=listing.classes,
        template=check_template(benchmark.template if template is None else template),
        root=listing.root,
        paths=tuple(path for path, _ in rows),
        labels=torch.tensor([label for _, label in rows], dtype=torch.int64),
        domains=None if domains is None else tuple(domains[path] for path, _ in rows),
        groups=None if listing.groups is None else tuple(listing.groups[path] for path, _ in rows),
    )


def _pick(benchmark: Benchmark, listing: Listing, split: str) -> list[tuple[str, int]]:
    """The rows of a split."""
    everything = [row for rows in listing.splits.values() for row in rows]
    if listing.domains is not None:
        groups = [(label, listing.domains[path]) for path, label in everything]
        wanted = "test" if split == "val" else split
        chosen = pick_split([path for path, _ in everything], groups, wanted, benchmark.name)
        return [everything[index] for index in chosen]
    if split == "all":
        return everything
    if split not in listing.splits:
        raise DataError(f"{benchmark.name}: has no split {split!r}, only {', '.join(listing.splits)} and all")
    return listing.splits[split]


def list_benchmark(benchmark: Benchmark, root: Path) -> Listing:
    """What the benchmark's files list, whether or not the images are there.

    Raises:
        DataError: a file is missing or malformed, or a path leaves the folder.
    """
    home = root / benchmark.folder
    if not home.is_dir():
        raise DataError(f"{home}: no such folder; {benchmark.name} must lie there", hint="data-check")
    listing = READERS[benchmark.kind](benchmark, home)
    try:
        for name in listing.classes:
            check_name(name)
    except InputError as error:
        raise DataError(f"{home}: {error}") from error
    return listing
