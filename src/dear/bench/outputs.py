"""What a grid leaves for people: tables in three formats and the page with plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dear._io.files import write_atomic
from dear.bench.ablations import Study, Variant
from dear.bench.cells import Cell
from dear.bench.grid import Grid
from dear.bench.records import Line, Result, gather, shown_names
from dear.bench.sheets import SHEETS, Sheet, ablation
from dear.bench.tables import text, write_tables
from dear.errors import RunError
from dear.report import results_plots as plots
from dear.report.results_page import results_page

if TYPE_CHECKING:
    import plotly.graph_objects as go


def found_in(grid: Grid, cells: Sequence[Cell]) -> list[tuple[Cell, Result]]:
    """The cells that have a result, in their order.

    Raises:
        RunError: none has.
    """
    pairs = [(cell, grid.read(cell)) for cell in dict.fromkeys(cells)]
    there = [(cell, result) for cell, result in pairs if result is not None]
    if not there:
        raise RunError(f"{grid.folder}: no cell has a result yet, so there is nothing to tabulate")
    return there


def write_protocol(
    grid: Grid,
    protocol: str,
    cells: Sequence[Cell],
    command: str = "",
    failed: Mapping[str, str] | None = None,
) -> list[Path]:
    """Tables and page of a protocol; returns the files, the page last."""
    results = found_in(grid, cells)
    lines = gather(results)
    sheet = SHEETS[protocol](lines)
    written = write_tables([sheet], grid.folder, stem=protocol)
    page = grid.folder / f"{protocol}.html"
    html = results_page(
        f"Results: {sheet.title.lower()}",
        f"{len(results)} cells; every number can be traced to a file in cells/.",
        figures_of(protocol, lines, fusion_weights(results)),
        [(sheet, texts_of(sheet))],
        _facts(results, command),
        failed,
    )
    write_atomic(page, html)
    return [*written, page]


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
            results = found_in(grid, cells)
            everything += results
            lines += gather(results, {cell.key: variant.name for cell in cells})
        sheets.append(ablation(study, lines))
        modes = {variant.name: variant.mode or lines[0].mode for variant in study.variants}
        shown = [line for line in lines if line.mode == modes[line.method]]
        plain = [Line(line.method, "default", line.dataset, line.shots, line.values) for line in shown]
        figures.append((study.title, study.question, plots.bars(plain, "hm")))
    written = write_tables(sheets, grid.folder, stem="ablations")
    page = grid.folder / "ablations.html"
    html = results_page(
        "Ablations",
        f"{len(studies)} studies; base-to-novel, harmonic mean of base and novel accuracy.",
        figures,
        [(sheet, texts_of(sheet)) for sheet in sheets],
        _facts(everything, command),
        failed,
    )
    write_atomic(page, html)
    return [*written, page]


def fusion_weights(results: Sequence[tuple[Cell, Result]]) -> dict[str, dict[str, float]]:
    """Mean over seeds of the learned fusion weights, by dataset; empty where no method has any."""
    sums: dict[str, list[Mapping[str, float]]] = {}
    for cell, result in results:
        weights = result.get("facts", {}).get("fusion_weights")
        if weights:
            sums.setdefault(cell.dataset, []).append(weights)
    shown = shown_names(cell.dataset for cell, _ in results)
    return {
        shown[dataset]: {token: math.fsum(row[token] for row in rows) / len(rows) for token in rows[0]}
        for dataset, rows in sums.items()
    }


def figures_of(
    protocol: str, lines: Sequence[Line], weights: Mapping[str, Mapping[str, float]]
) -> list[tuple[str, str, go.Figure]]:
    """The figures that fit a protocol."""
    figures: list[tuple[str, str, go.Figure]] = []
    if protocol == "base-to-novel":
        bars = "Harmonic mean of each seed, averaged; whiskers are the standard deviation over seeds."
        figures.append(("Harmonic mean", bars, plots.bars(lines, "hm")))
        curves = "Up is better on classes never trained, right on trained ones; curves join equal HM."
        figures.append(("Base against novel", curves, plots.base_novel_scatter(lines)))
    if protocol == "few-shot":
        sentence = "Accuracy over all classes; whiskers are the standard deviation over seeds."
        figures.append(("Accuracy against shots", sentence, plots.shot_curves(lines)))
    if protocol in ("cross-dataset", "domain-shift"):
        sentence = "Trained on the first dataset; the others were never seen in training."
        figures.append(("Accuracy by dataset", sentence, plots.bars(lines, "accuracy")))
    if protocol == "leave-one-domain-out":
        sentence = "Accuracy on each domain when it is the one left out of training."
        figures.append(("Accuracy on the unseen domain", sentence, plots.bars(lines, "target")))
    if weights and protocol in ("base-to-novel", "few-shot"):
        sentence = "Mean over seeds; a row sums to 1, and equal weights would be one sixth each."
        figures.append(("Fusion weights", sentence, plots.fusion_heat_map(weights)))
    return figures


def texts_of(sheet: Sheet) -> list[list[str]]:
    """The numbers of a sheet as text, row by row."""
    return [[text(entry) for entry in row.entries] for row in sheet.rows]


def _facts(results: Sequence[tuple[Cell, Result]], command: str) -> dict[str, str]:
    """How the numbers came about, for the foot of the page."""

    def all_of(values: Sequence[object]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values))

    made = [result["made_with"] for _, result in results if "made_with" in result]
    facts = {"Command": command} if command else {}
    facts |= {
        "Backbone": all_of([f"{cell.backbone} ({cell.fingerprint})" for cell, _ in results]),
        "Methods": all_of([cell.method for cell, _ in results]),
        "Seeds": all_of([cell.seed for cell, _ in results]),
    }
    for name, heading in (("dear", "dear"), ("torch", "PyTorch"), ("hardware", "Hardware")):
        facts[heading] = all_of([entry[name] for entry in made])
    trained = math.fsum(result.get("seconds", {}).get("train", 0.0) for _, result in results)
    tested = math.fsum(result.get("seconds", {}).get("evaluate", 0.0) for _, result in results)
    facts["Time"] = f"{trained:.0f} s of training and {tested:.0f} s of testing, summed over cells"
    return facts
