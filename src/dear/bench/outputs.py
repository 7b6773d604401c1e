"""Outputs of a grid: tables in three formats and a page with plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from dear.bench import plots
from dear.bench.ablations import Study, Variant
from dear.bench.ablations import table as study_table
from dear.bench.cells import Cell
from dear.bench.plan import find_protocol
from dear.bench.protocols import Figures
from dear.bench.store import Grid
from dear.bench.tables import Line, Result, Sheet, format_entry, short_names, variant_names, write_tables
from dear.errors import RunError
from dear.report.page import Table, render
from dear.utils.files import write_atomic

TERMS = {
    "base": "trained classes: the half of the classes that was trained on",
    "novel": "new classes: the other half, whose names alone are known",
    "HM": "harmonic mean of base and novel accuracy; high only when both are",
    "shots": "training images per class",
    "± ": "sample standard deviation over seeds",
    "zeroshot": "the frozen backbone, not trained at all",
}
"""Words of the results page."""


def read_results(grid: Grid, cells: Sequence[Cell]) -> list[tuple[Cell, Result]]:
    """The cells that have a result, in their order."""
    pairs = [(cell, grid.read(cell)) for cell in dict.fromkeys(cells)]
    return [(cell, result) for cell, result in pairs if result is not None]


def write_protocol(
    grid: Grid,
    protocol: str,
    cells: Sequence[Cell],
    command: str = "",
    failed: Mapping[str, str] | None = None,
) -> list[Path]:
    """Tables and page of a protocol; returns the files, the page last."""
    results = read_results(grid, cells)
    if not results:
        raise RunError(f"{grid.folder}: no cell has a result yet, so there is nothing to tabulate")
    chosen = find_protocol(protocol)
    sheet = chosen.table(chosen.gather(results))
    lead = f"{len(results)} cells; every result can be traced to a file in cells/."
    words = {"title": f"Results: {sheet.title.lower()}", "lead": lead, "failed": failed or {}}
    return _write(grid, protocol, [sheet], figures_of(results), results, command, words)


def write_studies(
    grid: Grid,
    studies: Sequence[tuple[Study, Sequence[tuple[Variant, Sequence[Cell]]]]],
    command: str = "",
    failed: Mapping[str, str] | None = None,
) -> list[Path]:
    """Tables and page of ablation studies; returns the files, the page last."""
    sheets, figures, everything = [], [], []
    for study, planned in studies:
        lines: list[Line] = []
        for variant, cells in planned:
            results = read_results(grid, cells)
            everything += results
            names = {cell.key: variant.name for cell in cells}
            lines += find_protocol(study.protocol).gather(results, names)
        if not lines:
            continue  # every cell of this study failed; the page says so
        sheets.append(study_table(study, lines))
        plain = [replace(line, mode="default") for line in study.lines_in_mode(lines)]
        figures.append((study.title, study.question, plots.bars(plain, "hm")))
    if not sheets:
        raise RunError(f"{grid.folder}: no cell has a result yet, so there is nothing to tabulate")
    lead = f"{len(studies)} studies; base-to-novel, harmonic mean of base and novel accuracy."
    words = {"title": "Ablations", "lead": lead, "failed": failed or {}}
    return _write(grid, "ablations", sheets, figures, everything, command, words)


def _write(
    grid: Grid,
    stem: str,
    sheets: Sequence[Sheet],
    figures: Figures,
    results: Sequence[tuple[Cell, Result]],
    command: str,
    words: Mapping[str, Any],
) -> list[Path]:
    """Write the tables and the page with figures, tables and how the results came about."""
    written = write_tables(sheets, grid.folder, stem)
    tables = [(sheet.title, to_page_table(sheet), sheet.notes) for sheet in sheets]
    facts = _facts(results, command)
    page = grid.folder / f"{stem}.html"
    write_atomic(
        page, render("results.html", terms=TERMS, figures=figures, tables=tables, facts=facts, **words)
    )
    return [*written, page]


def to_page_table(sheet: Sheet) -> Table:
    """The table for a page: published rows are marked, groups of rows are separated."""
    rows, classes, before = [], [], None
    for row in sheet.rows:
        new_group = len(row.labels) > 1 and before is not None and row.labels[0] != before
        before = row.labels[0]
        classes.append(" ".join((["published"] if row.published else []) + (["first"] if new_group else [])))
        *names, last = row.labels
        label = f"{last} (published)" if row.published else last
        rows.append((*names, label, *(format_entry(entry) for entry in row.entries)))
    columns = (*sheet.labels, *sheet.columns)
    return Table(columns, tuple(rows), labels=len(sheet.labels), classes=tuple(classes))


def fusion_weights(results: Sequence[tuple[Cell, Result]]) -> dict[str, dict[str, float]]:
    """Mean over seeds of learned fusion weights, by dataset; empty where no method has any.

    Configurations of a method, which may have other weights by name, are separate rows.
    """
    weights_of: dict[str, dict[str, list[float]]] = {}
    shown, names = short_names(cell.dataset for cell, _ in results), variant_names([c for c, _ in results])
    weighed = [(cell, result.get("facts", {}).get("fusion_weights")) for cell, result in results]
    with_weights = [(cell, weights) for cell, weights in weighed if weights]
    several = len({names[cell.key] for cell, _ in with_weights}) > 1
    for cell, weights in with_weights:
        title = shown[cell.dataset] + (f", {names[cell.key]}" if several else "")
        for token, weight in weights.items():
            weights_of.setdefault(title, {}).setdefault(token, []).append(weight)
    return {
        title: {token: fmean(values) for token, values in tokens.items()}
        for title, tokens in weights_of.items()
    }


def figures_of(results: Sequence[tuple[Cell, Result]]) -> Figures:
    """The figures of a protocol's results: its own, and the learned fusion weights where there are any."""
    protocol = find_protocol(results[0][0].protocol)
    figures = protocol.figures(protocol.gather(results))
    weights = fusion_weights(results)
    if weights:
        sentence = "Mean over seeds; a row sums to 1, and equal weights would be the same everywhere."
        figures.append(("Fusion weights", sentence, plots.fusion_heat_map(weights)))
    return figures


def _facts(results: Sequence[tuple[Cell, Result]], command: str) -> dict[str, str]:
    """How the results came about, for the foot of the page."""

    def all_of(values: Sequence[object]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values))

    made = [result["made_with"] for _, result in results if "made_with" in result]
    facts = {"Command": command} if command else {}
    facts |= {
        "Backbone": all_of([f"{cell.spec.backbone} ({cell.spec.identity})" for cell, _ in results]),
        "Methods": all_of([cell.method for cell, _ in results]),
        "Seeds": all_of([cell.seed for cell, _ in results]),
    }
    for name, heading in (("dear", "dear"), ("torch", "PyTorch"), ("hardware", "Hardware")):
        facts[heading] = all_of([entry[name] for entry in made])
    trained = math.fsum(result.get("seconds", {}).get("train", 0.0) for _, result in results)
    tested = math.fsum(result.get("seconds", {}).get("evaluate", 0.0) for _, result in results)
    facts["Time"] = f"{trained:.0f} s of training and {tested:.0f} s of testing, summed over cells"
    return facts
