"""The Compare tab: result files of a grid as tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dear.bench.cells import Cell
from dear.bench.grid import PROTOCOLS, read_cell
from dear.bench.outputs import figures_of, texts_of
from dear.bench.tables import Result, Sheet
from dear.errors import DearError, UsageError
from dear.report.page import render
from dear.report.results_page import sheet_table
from dear.studio.desk import Desk
from dear.studio.search import check_folder

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST = 5000


@dataclass(frozen=True)
class Shown:
    """The results of one protocol: a table as HTML, and figures with their headings."""

    table: str
    figures: tuple[tuple[str, go.Figure], ...]
    cells: int


def result_files(desk: Desk, uploads: Sequence[str], folder: str) -> list[Path]:
    """The files to read: uploads, or those of a grid's folder on this computer.

    Raises:
        DearError: there are none, too many, or the folder may not be named.
    """
    if folder.strip():
        root = check_folder(desk, folder.strip())
        inside = root / "cells" if (root / "cells").is_dir() else root
        files = [path for path in sorted(inside.glob("*.json")) if not path.name.endswith(".error.json")]
    else:
        files = [Path(path) for path in uploads]
    if not files:
        raise UsageError("choose result files first: the .json files in the cells folder of `dear bench`")
    if len(files) > MOST:
        raise UsageError(f"{len(files):,} files are too many; the studio compares up to {MOST:,}")
    return files


def compare(files: Sequence[Path]) -> dict[str, Shown]:
    """Tables and figures of result files, by protocol.

    Raises:
        DearError: a file is not a result of `dear bench`; it is named without its folder.
    """
    groups: dict[str, dict[str, tuple[Cell, Result]]] = {}
    for path in files:
        try:
            cell, result = read_cell(path)
        except DearError as error:
            raise DearError(str(error).replace(str(path), path.name)) from None
        groups.setdefault(cell.protocol, {})[cell.key] = (cell, result)
    shown = {}
    for protocol, cells in groups.items():
        if protocol not in PROTOCOLS:
            raise DearError(f"results of the protocol {protocol!r} cannot be shown by this version")
        results = list(cells.values())
        try:
            found = PROTOCOLS[protocol]
            sheet = found.table(found.gather(results))
            plots = figures_of(results)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DearError(f"the {protocol} results are damaged ({error})") from None
        shown[protocol] = Shown(
            sheet_html(sheet), tuple((head, figure) for head, _, figure in plots), len(cells)
        )
    return shown


def sheet_html(sheet: Sheet) -> str:
    """A table of results; published rows are marked."""
    table = sheet_table(sheet, texts_of(sheet))
    return render("studio/sheet.html", title=sheet.title, table=table, notes=sheet.notes)
