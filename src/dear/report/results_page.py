"""The results page of a grid: figures and tables in one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dear.report.page import Table, render

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from dear.bench.tables import Sheet

TERMS = {
    "base": "trained classes: the half of the classes that was trained on",
    "novel": "new classes: the other half, whose names alone are known",
    "HM": "harmonic mean of base and novel accuracy; high only when both are",
    "shots": "training images per class",
    "± ": "sample standard deviation over seeds",
    "zeroshot": "the frozen backbone, not trained at all",
}


def results_page(
    title: str,
    lead: str,
    figures: Sequence[tuple[str, str, go.Figure]],
    tables: Sequence[tuple[Sheet, Sequence[Sequence[str]]]],
    facts: Mapping[str, str],
    failed: Mapping[str, str] | None = None,
) -> str:
    """The whole page as HTML.

    Args:
        title: heading and window title.
        lead: a sentence below it.
        figures: (heading, sentence, figure), in order.
        tables: sheets with the text of each number, row by row.
        facts: how the numbers came about (command, backbone, versions).
        failed: cells that failed, and why.
    """
    return render(
        "results.html",
        title=title,
        lead=lead,
        terms=TERMS,
        figures=figures,
        tables=[(sheet.title, sheet_table(sheet, cells), sheet.notes) for sheet, cells in tables],
        facts=facts,
        failed=failed or {},
    )


def sheet_table(sheet: Sheet, cells: Sequence[Sequence[str]]) -> Table:
    """A sheet as a table: published rows are marked, groups of rows are separated."""
    rows, classes, before = [], [], None
    for row, numbers in zip(sheet.rows, cells, strict=True):
        new_group = len(row.labels) > 1 and before is not None and row.labels[0] != before
        before = row.labels[0]
        classes.append(" ".join((["published"] if row.published else []) + (["first"] if new_group else [])))
        *names, last = row.labels
        rows.append((*names, f"{last} (published)" if row.published else last, *numbers))
    columns = (*sheet.labels, *sheet.columns)
    return Table(columns, tuple(rows), labels=len(sheet.labels), classes=tuple(classes))
