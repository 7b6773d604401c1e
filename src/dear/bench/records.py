"""Results of a grid gathered over seeds: what tables and plots are made of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dear.bench.cells import Cell, as_written, canonical
from dear.bench.published import harmonic_mean

Result = Mapping[str, Any]
Configuration = dict[tuple[str, str], Any]  #: (part of a cell, name) -> value


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
        shots: images per class.
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


def gather(
    results: Iterable[tuple[Cell, Result]],
    place: Callable[[Cell, str, Mapping[str, str]], tuple[str, str]],
    names: Mapping[str, str],
) -> list[Line]:
    """Lines of cells of one protocol, in the order in which they come.

    Args:
        results: cells with their results.
        place: the protocol's (dataset, column) under which a value of a cell is shown.
        names: name of the method or variant by cell key.
    """
    results = list(results)
    shown = shown_names(
        [name for cell, _ in results for name in (cell.dataset, *cell.setting.get("targets", ()))]
    )
    found: dict[tuple[str, str, str, int], dict[str, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for cell, result in results:
        for mode, row in result["modes"].items():
            for column, value in row.items():
                if value is None:
                    continue
                where, heading = place(cell, column, shown)
                found[names[cell.key], mode, where, cell.shots][heading][cell.seed] = float(value)
    return [Line(*key, values={c: dict(v) for c, v in columns.items()}) for key, columns in found.items()]


def variant_names(cells: Sequence[Cell]) -> dict[str, str]:
    """Name of each cell's row by cell key: the method, and what differs between its cells.

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
        configured = [_configuration(cell) for cell in group]
        differing = _differing(configured)
        same_run: dict[Any, list[Configuration]] = defaultdict(list)
        for cell in group:
            run = (cell.dataset, cell.setting.get("held_out"), cell.shots, cell.seed)
            same_run[run].append({("setting", k): cell.setting.get(k) for k in ("draw", "template")})
        differing += sorted({key for settings in same_run.values() for key in _differing(settings)})
        options = {name for part, name in differing if part == "options"}
        inside = {key for key in differing if key[0] in ("options", "recipe")}
        for cell, known in zip(group, configured, strict=True):
            preset = preset_of(cell) if inside else None
            if preset is not None:
                rest = ", ".join(f"{key[1]}={known.get(key)}" for key in differing if key not in inside)
                names[cell.key] = f"{method}@{preset}" + (f" ({rest})" if rest else "")
                continue
            values = {**known, **{("setting", k): v for k, v in cell.setting.items()}}
            words = ", ".join(
                f"{'recipe ' if part == 'recipe' and name in options else ''}{name}={values.get(key)}"
                for key in differing
                for part, name in [key]
            )
            names[cell.key] = f"{method} ({words})" if words else method
    return names


def preset_of(cell: Cell) -> str | None:
    """The preset whose options and recipe a cell has, as in METHOD@PRESET; None where it is none."""
    from dear.methods import METHODS
    from dear.train import Recipe

    if cell.method not in METHODS:
        return None
    kind = METHODS[cell.method]
    for name, chosen in kind.presets.items():
        recipe = as_written(Recipe.of(kind, **chosen.recipe))
        recipe.pop("seed")
        wanted = {"options": as_written(kind.configure(chosen.options)), "recipe": recipe}
        if canonical(wanted) == canonical({"options": dict(cell.options), "recipe": dict(cell.recipe)}):
            return str(name)
    return None


def _configuration(cell: Cell) -> Configuration:
    """Everything that makes two cells of a method different experiments, by part and name."""
    parts = {"options": cell.options, "recipe": cell.recipe}
    found: Configuration = {(part, name): v for part, values in parts.items() for name, v in values.items()}
    found["backbone", "backbone"] = cell.fingerprint.removeprefix("sha256:")[:8]
    if cell.roles:
        found["roles", "roles"] = _roles(cell)
    return found


def _differing(settings: Sequence[Configuration]) -> list[tuple[str, str]]:
    """The parts and names that are not the same everywhere, sorted by name."""
    keys = {key for setting in settings for key in setting}
    differing = [key for key in keys if len({repr(setting.get(key)) for setting in settings}) > 1]
    return sorted(differing, key=lambda key: (key[1], key[0]))


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
