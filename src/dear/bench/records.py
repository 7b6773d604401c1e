"""Numbers of a grid gathered over seeds: what tables and plots are made of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dear.bench.cells import Cell
from dear.bench.published import harmonic_mean

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A number over seeds, as a fraction of 1.

    Attributes:
        mean: mean over seeds.
        std: sample standard deviation over seeds (n - 1); None for one seed.
        seeds: how many.
    """

    mean: float
    std: float | None = None
    seeds: int = 1


def figure(values: Sequence[float]) -> Figure:
    """Mean and sample standard deviation.

    >>> figure([0.5, 0.7])
    Figure(mean=0.6, std=0.1414..., seeds=2)
    """
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Figure(mean)
    spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Figure(mean, math.sqrt(spread), len(values))


@dataclass(frozen=True)
class Line:
    """What one method (or variant) in one mode reached on one dataset, over seeds.

    Attributes:
        method: name of the method or variant.
        mode: way to predict.
        dataset: dataset or, for transfer, the dataset tested on; the held-out domain for domains.
        shots: images a class.
        values: column -> seed -> value.
    """

    method: str
    mode: str
    dataset: str
    shots: int
    values: Mapping[str, Mapping[int, float]]

    def seeds(self, column: str) -> Mapping[int, float]:
        """Value of each seed; empty where the column was not measured."""
        return self.values.get(column, {})

    def figure(self, column: str) -> Figure | None:
        """Mean and spread of a column; None where it was not measured."""
        found = self.seeds(column)
        return figure(list(found.values())) if found else None

    def hm_of_means(self) -> float | None:
        """Harmonic mean of the mean base and the mean novel accuracy."""
        base, novel = self.figure("base"), self.figure("novel")
        return None if base is None or novel is None else harmonic_mean(base.mean, novel.mean)


def gather(results: Iterable[tuple[Cell, Result]], names: Mapping[str, str] | None = None) -> list[Line]:
    """Lines of cells of one protocol, in the order in which they come.

    Args:
        results: cells with their results.
        names: name of the variant by cell key, for ablations; else the method's name is used, with what
            differs where the cells hold one method in several configurations.
    """
    results = list(results)
    shown = shown_names(
        [place for cell, _ in results for place in (cell.dataset, *cell.setting.get("targets", ()))]
    )
    names = variant_names([cell for cell, _ in results]) if names is None else names
    found: dict[tuple[str, str, str, int], dict[str, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for cell, result in results:
        for mode, row in result["modes"].items():
            for column, value in row.items():
                if value is None:
                    continue
                place, heading = _place(cell, column, shown)
                found[names[cell.key], mode, place, cell.shots][heading][cell.seed] = float(value)
    return [Line(*key, values={c: dict(v) for c, v in columns.items()}) for key, columns in found.items()]


def variant_names(cells: Sequence[Cell]) -> dict[str, str]:
    """Name of each cell's row by cell key: the method, and the options that differ between its cells.

    >>> one = Cell("few-shot", "purify", "x", 1, 0, "mini", "sha256:0", {"rank": 2, "gates": True})
    >>> two = Cell("few-shot", "purify", "x", 1, 0, "mini", "sha256:0", {"rank": 2, "gates": False})
    >>> sorted(variant_names([one, two]).values()), variant_names([one])[one.key]
    (['purify (gates=False)', 'purify (gates=True)'], 'purify')
    """
    own: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        own[cell.method].append(cell)
    names = {}
    for method, group in own.items():
        settings = [
            {**cell.options, **cell.recipe, **({"roles": _roles(cell)} if cell.roles else {})}
            for cell in group
        ]
        keys = {key for setting in settings for key in setting}
        differing = sorted(key for key in keys if len({repr(setting.get(key)) for setting in settings}) > 1)
        for cell, setting in zip(group, settings, strict=True):
            words = ", ".join(f"{key}={setting.get(key)}" for key in differing)
            names[cell.key] = f"{method} ({words})" if words else method
    return names


def _roles(cell: Cell) -> str:
    """A word for a cell's role map: how it was made, and its hash."""
    return " ".join(filter(None, (str(cell.roles.get("spec", "")), str(cell.roles.get("digest", ""))[:8])))


def shown_names(datasets: Iterable[str]) -> dict[str, str]:
    """How datasets are called in tables: a path by its last part that says something, if that is its alone.

    >>> list(shown_names(["/data/pets/index.csv", "/data/birds", "EuroSAT"]).values())
    ['pets', 'birds', 'EuroSAT']
    >>> list(shown_names(["/old/pets/index.csv", "/new/pets/index.csv"]).values())
    ['/old/pets/index.csv', '/new/pets/index.csv']
    """
    names = list(dict.fromkeys(datasets))
    last = [_last(PurePath(name)) if PurePath(name).is_absolute() else name for name in names]
    return {name: short if last.count(short) == 1 else name for name, short in zip(names, last, strict=True)}


def _last(path: PurePath) -> str:
    return path.parent.name if path.stem == "index" and path.parent.name else path.name


def _place(cell: Cell, column: str, shown: Mapping[str, str]) -> tuple[str, str]:
    """(dataset, column) under which a value of a cell is shown."""
    if cell.protocol in ("cross-dataset", "domain-shift"):
        return shown[column], "accuracy"
    if cell.protocol == "leave-one-domain-out":
        return f"{shown[cell.dataset]}/{cell.setting['held_out']}", column
    return shown[cell.dataset], column


def average(lines: Sequence[Line], name: str = "Average") -> Line:
    """The mean over datasets, seed by seed; only seeds that all of them have."""
    columns = [c for c in lines[0].values if all(c in line.values for line in lines)]
    values: dict[str, dict[int, float]] = {}
    for column in columns:
        seeds = set.intersection(*(set(line.seeds(column)) for line in lines))
        if seeds:
            values[column] = {
                seed: math.fsum(line.seeds(column)[seed] for line in lines) / len(lines)
                for seed in sorted(seeds)
            }
    first = lines[0]
    return Line(first.method, first.mode, name, first.shots, values)


def grouped(lines: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    """Lines by (method, mode), in the order in which they come."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.method, line.mode), []).append(line)
    return groups
