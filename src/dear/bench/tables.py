"""Results over seeds and their tables: ours and the paper's, written as Markdown, CSV and LaTeX.

`gather` makes lines of cells: what one method in one mode reached on one dataset, over seeds. Protocols
arrange lines in a `Sheet`, and `write_tables` writes sheets.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from dear.bench.cells import Cell, resolve_defaults
from dear.bench.published import Number
from dear.runs.spec import Spec
from dear.utils.files import write_atomic
from dear.utils.text import spreadsheet_safe

Result = Mapping[str, Any]
Configuration = dict[tuple[str, str], Any]  #: (part of a cell, name) -> value


@dataclass(frozen=True)
class Figure:
    """A number over seeds, as a fraction of 1."""

    mean: float  #: mean over seeds
    std: float | None = None  #: sample standard deviation over seeds (n - 1); None for one seed
    seeds: int = 1  #: how many


def figure(values: Sequence[float]) -> Figure:
    """Mean and sample standard deviation.

    >>> figure([0.5, 0.7])
    Figure(mean=0.6, std=0.1414..., seeds=2)
    """
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Figure(mean)
    spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Figure(mean, math.sqrt(spread), len(values))


@dataclass(frozen=True)
class Line:
    """What one method (or variant) in one mode reached on one dataset, over seeds."""

    method: str  #: name of the method or variant
    mode: str  #: way to predict
    dataset: str  #: dataset or, for transfer, the dataset tested on; the held-out domain for domains
    shots: int  #: images per class
    values: Mapping[str, Mapping[int, float]]  #: column -> seed -> value

    def seeds(self, column: str) -> Mapping[int, float]:
        """Value of each seed; empty where the column was not measured."""
        return self.values.get(column, {})

    def figure(self, column: str) -> Figure | None:
        """Mean and spread of a column; None where it was not measured."""
        values = self.seeds(column)
        return figure(list(values.values())) if values else None


def gather(
    results: Iterable[tuple[Cell, Result]],
    column_of: Callable[[Cell, str, Mapping[str, str]], tuple[str, str]],
    names: Mapping[str, str],
) -> list[Line]:
    """Lines of cells of one protocol, in the order in which they come.

    `column_of` is the protocol's; `names` has the name of the method or variant by cell key.
    """
    results = list(results)
    shown = short_names(
        [name for cell, _ in results for name in (cell.dataset, *cell.setting.get("targets", ()))]
    )
    values: dict[tuple[str, str, str, int], dict[str, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for cell, result in results:
        for mode, row in result["modes"].items():
            for column, value in row.items():
                if value is None:
                    continue
                where, heading = column_of(cell, column, shown)
                values[names[cell.key], mode, where, cell.shots][heading][cell.seed] = float(value)
    return [Line(*key, values={c: dict(v) for c, v in columns.items()}) for key, columns in values.items()]


def variant_names(cells: Sequence[Cell]) -> dict[str, str]:
    """Name of each cell's row by cell key: the method, and what differs between its cells.

    >>> from dear.runs.spec import Spec
    >>> one = Cell(protocol="few-shot", spec=Spec(method="purify", options={"rank": 2, "gates": True}))
    >>> two = Cell(protocol="few-shot", spec=Spec(method="purify", options={"rank": 2, "gates": False}))
    >>> sorted(variant_names([one, two]).values()), variant_names([one])[one.key]
    (['purify (gates=False)', 'purify (gates=True)'], 'purify')
    """
    cells_of: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        cells_of[cell.method].append(cell)
    names = {}
    for method, group in cells_of.items():
        configured = [_configuration(cell) for cell in group]
        differing = _differences(configured)
        same_run: dict[Any, list[Configuration]] = defaultdict(list)
        for cell in group:
            run = (cell.dataset, cell.setting.get("held_out"), cell.shots, cell.seed)
            same_run[run].append(_draw_configuration(cell))
        differing += sorted({key for settings in same_run.values() for key in _differences(settings)})
        options = {name for part, name in differing if part == "options"}
        inside = {key for key in differing if key[0] in ("options", "recipe")}
        for cell, known in zip(group, configured, strict=True):
            preset = preset_of(cell) if inside else None
            if preset is not None:
                rest = ", ".join(f"{key[1]}={known.get(key)}" for key in differing if key not in inside)
                names[cell.key] = f"{method}@{preset}" + (f" ({rest})" if rest else "")
                continue
            values = {**known, **_draw_configuration(cell)}
            words = ", ".join(
                f"{'recipe ' if key[0] == 'recipe' and key[1] in options else ''}{key[1]}={values.get(key)}"
                for key in differing
            )
            names[cell.key] = f"{method} ({words})" if words else method
    return names


def preset_of(cell: Cell) -> str | None:
    """The preset whose options and recipe a cell has, as in METHOD@PRESET; None where it is none."""
    from dear.methods import METHODS

    if cell.method not in METHODS:
        return None
    for name in METHODS[cell.method].presets:
        alone = resolve_defaults(Spec(method=cell.method, preset=name, seed=cell.seed))
        if (alone.options, alone.recipe) == (cell.spec.options, cell.spec.recipe):
            return str(name)
    return None


def _configuration(cell: Cell) -> Configuration:
    """Everything that makes two cells of a method different experiments, by part and name."""
    parts = {"options": cell.spec.options, "recipe": cell.spec.recipe}
    configuration: Configuration = {
        (part, name): v for part, values in parts.items() for name, v in values.items()
    }
    configuration.pop(("recipe", "seed"), None)
    configuration["backbone", "backbone"] = cell.spec.identity.removeprefix("sha256:")[:8]
    if cell.spec.roles_digest is not None:
        configuration["roles", "roles"] = f"{cell.roles} {cell.spec.roles_digest[:8]}".strip()
    return configuration


def _draw_configuration(cell: Cell) -> Configuration:
    """What may differ between cells of one dataset, number of shots and seed, except for the method."""
    return {("setting", "template"): cell.spec.template, ("setting", "images"): cell.spec.data_digest[:8]}


def _differences(settings: Sequence[Configuration]) -> list[tuple[str, str]]:
    """The parts and names that are not the same everywhere, sorted by name."""
    keys = {key for setting in settings for key in setting}
    differing = [key for key in keys if len({repr(setting.get(key)) for setting in settings}) > 1]
    return sorted(differing, key=lambda key: (key[1], key[0]))


def short_names(datasets: Iterable[str]) -> dict[str, str]:
    """Names of datasets in tables: a path by its last part where that is unique.

    >>> list(short_names(["/data/pets/index.csv", "/data/birds", "EuroSAT"]).values())
    ['pets', 'birds', 'EuroSAT']
    >>> list(short_names(["/old/pets/index.csv", "/new/pets/index.csv"]).values())
    ['/old/pets/index.csv', '/new/pets/index.csv']
    """
    names = list(dict.fromkeys(datasets))
    last = [_last(PurePath(name)) if PurePath(name).is_absolute() else name for name in names]
    return {name: short if last.count(short) == 1 else name for name, short in zip(names, last, strict=True)}


def _last(path: PurePath) -> str:
    return path.parent.name if path.stem == "index" and path.parent.name else path.name


def average(lines: Sequence[Line]) -> Line:
    """The mean over datasets, seed by seed; only seeds that all of them have."""
    columns = [c for c in lines[0].values if all(c in line.values for line in lines)]
    values: dict[str, dict[int, float]] = {}
    for column in columns:
        seeds = set.intersection(*(set(line.seeds(column)) for line in lines))
        if seeds:
            values[column] = {
                seed: statistics.fmean(line.seeds(column)[seed] for line in lines) for seed in sorted(seeds)
            }
    first = lines[0]
    return Line(first.method, first.mode, "Average", first.shots, values)


def group_lines(lines: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    """Lines by (method, mode), in the order in which they come."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.method, line.mode), []).append(line)
    return groups


Entry = Figure | Number | float | None  #: ours over seeds, the paper's, a derived fraction, or nothing


@dataclass(frozen=True)
class SheetRow:
    """A row: its labels, one entry per column, and whether it is the paper's."""

    labels: tuple[str, ...]
    entries: tuple[Entry, ...]
    published: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table."""

    title: str  #: heading
    labels: tuple[str, ...]  #: headings of the label columns
    columns: tuple[str, ...]  #: headings of the number columns
    rows: tuple[SheetRow, ...]  #: rows; consecutive rows with the same first label belong together
    notes: tuple[str, ...] = ()  #: sentences below the table


def format_entry(entry: Entry, plus_minus: str = " ± ") -> str:
    """A number as printed in a table, in percent with two decimals.

    >>> format_entry(Figure(0.8594, 0.0021, 3)), format_entry(None), format_entry(0.5)
    ('85.94 ± 0.21', '–', '50.00')
    """
    if entry is None:
        return "–"
    if isinstance(entry, Number):
        spread = "" if entry.std is None else f"{plus_minus}{entry.std:.2f}"
        return f"{entry.value:.2f}{spread}{'†' if entry.note else ''}"
    if isinstance(entry, Figure):
        spread = "" if entry.std is None else f"{plus_minus}{100 * entry.std:.2f}"
        return f"{100 * entry.mean:.2f}{spread}"
    return f"{100 * entry:.2f}"


def markdown(sheet: Sheet) -> str:
    """The table for reading: published rows in italics, corrected numbers with a dagger."""
    head = [*sheet.labels, *sheet.columns]
    lines = [f"## {sheet.title}", ""]
    lines.append("| " + " | ".join(head) + " |")
    lines.append("|" + "---|" * len(sheet.labels) + "---:|" * len(sheet.columns))
    for row in sheet.rows:
        cells = [*(_cell(label) for label in _labels(row)), *(format_entry(entry) for entry in row.entries)]
        if row.published:
            cells = [f"*{cell}*" if cell and cell != "–" else cell for cell in cells]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"- {_cell(note)}" for note in sheet.notes]
    return "\n".join(lines) + "\n"


def _cell(label: str) -> str:
    """Text that cannot end a cell of a Markdown table early."""
    return label.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _labels(row: SheetRow) -> list[str]:
    """The labels, the last one saying that the row is the paper's."""
    labels = list(row.labels)
    if row.published:
        labels[-1] = f"{labels[-1]} published".strip()
    return labels


def to_csv(sheet: Sheet) -> str:
    """The table for programs: fractions of 1, mean, standard deviation and number of seeds per column."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = [f"{column}{part}" for column in sheet.columns for part in ("", " std", " seeds", " printed")]
    writer.writerow([*sheet.labels, "published", *head])
    for row in sheet.rows:
        cells = [part for entry in row.entries for part in _csv_cells(entry)]
        writer.writerow([*(spreadsheet_safe(label) for label in row.labels), int(row.published), *cells])
    return out.getvalue()


def _csv_cells(entry: Entry) -> tuple[str, str, str, str]:
    """(value, std, seeds, printed): exact digits, published numbers as fractions too."""
    if entry is None:
        return "", "", "", ""
    if isinstance(entry, Number):
        std = "" if entry.std is None else f"{entry.std / 100:.6g}"
        return f"{entry.value / 100:.6g}", std, "", f"{entry.printed / 100:.6g}"
    if isinstance(entry, Figure):
        return repr(entry.mean), "" if entry.std is None else repr(entry.std), str(entry.seeds), ""
    return repr(entry), "", "", ""


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


def _escape(label: str) -> str:
    r"""Text for LaTeX.

    >>> _escape("50 % of_all")
    '50 \\% of\\_all'
    """
    return (
        "".join(_LATEX.get(letter, letter) for letter in label)
        .replace("±", r"$\pm$")
        .replace("–", "--")
        .replace("†", r"$\dagger$")
    )


def latex(sheet: Sheet) -> str:
    """The table for papers: booktabs rules, published rows in italics, notes as comments."""
    form = "l" * len(sheet.labels) + "r" * len(sheet.columns)
    lines = [f"% {_escape(note)}" for note in sheet.notes]
    lines += [r"\begin{tabular}{" + form + "}", r"\toprule"]
    lines.append(" & ".join(_escape(name) for name in (*sheet.labels, *sheet.columns)) + r" \\")
    lines.append(r"\midrule")
    before = None
    for row in sheet.rows:
        if before is not None and len(sheet.labels) > 1 and row.labels[0] != before and len(row.labels) > 2:
            lines.append(r"\midrule")
        before = row.labels[0]
        cells = [_escape(cell) for cell in (*_labels(row), *(format_entry(entry) for entry in row.entries))]
        if row.published:
            cells = [rf"\textit{{{cell}}}" if cell else cell for cell in cells]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def write_tables(sheets: Sequence[Sheet], folder: Path, stem: str) -> list[Path]:
    """Write sheets as `STEM.md`, and each as CSV and LaTeX; returns the files."""
    written = [folder / f"{stem}.md"]
    write_atomic(written[0], "\n".join(markdown(sheet) for sheet in sheets))
    for sheet in sheets:
        words = re.sub(r"[^a-z0-9]+", "-", sheet.title.lower()).strip("-")
        name = stem if len(sheets) == 1 else f"{stem}-{words}"
        for ending, content in ((".csv", to_csv(sheet)), (".tex", latex(sheet))):
            path = folder / f"{name}{ending}"
            write_atomic(path, content)
            written.append(path)
    return written
