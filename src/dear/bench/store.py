"""A grid on disk: one file per cell; existing results are kept, missing ones are computed.

A cell's file has a declared schema, checked before its results reach a table or a page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from typing import Protocol as Interface

import msgspec
from msgspec import Meta

from dear.bench.cells import Cell, Environment, Outcome
from dear.bench.plan import PROTOCOLS
from dear.errors import DearError, RunError
from dear.runs.spec import Name, digest
from dear.utils.files import read_json, require_writable, write_atomic, write_json
from dear.utils.schema import Strict, Whole, check

KIND = "cell of a grid"
SCHEMA = 1  #: of a cell's file
Share = Annotated[float, Meta(ge=0, le=1)]


class MadeWith(msgspec.Struct, frozen=True):
    """Versions and machine; more names are allowed."""

    dear: Name
    torch: Name
    hardware: Name


class Facts(msgspec.Struct, frozen=True):
    """What a method reports about itself; other names are allowed but not shown."""

    fusion_weights: dict[Name, float] = {}


class Result(msgspec.Struct, frozen=True):
    """Fields of every result; protocols and later versions add columns and names."""

    #: mode -> column -> a fraction of 1, or null where nothing could be measured
    modes: Annotated[dict[Name, dict[Name, Share | None]], Meta(min_length=1)]
    facts: Facts = Facts()
    seconds: dict[Name, float] = {}
    trainable_parameters: Whole = 0
    adapter_bytes: Whole = 0
    steps: Whole = 0
    made_with: MadeWith | None = None


class Document(Strict, frozen=True):
    """A whole file."""

    schema: Literal[1]
    key: Name
    cell: Cell
    result: Result


def read_cell(path: str | os.PathLike[str]) -> tuple[Cell, Mapping[str, Any]]:
    """The cell and the result in one file of a grid."""
    source, raw = os.fspath(path), read_json(path, KIND)
    document = check(raw, Document, source, KIND, error=RunError)
    cell = document.cell
    if cell.key != document.key:
        raise RunError(f"{source}: the key does not fit the configuration; the file was changed by hand")
    if cell.protocol in PROTOCOLS:
        _check_columns(cell, document.result, source)
    return cell, raw["result"]


def _check_columns(cell: Cell, result: Result, source: str) -> None:
    """Refuse a setting or columns that the cell's protocol does not have."""
    protocol = PROTOCOLS[cell.protocol]
    check(dict(cell.setting), protocol.setting, source, f"setting of {protocol.name}", error=RunError)
    allowed = protocol.columns(cell)
    columns = {column for row in result.modes.values() for column in row}
    if allowed is not None and not columns <= allowed:
        raise RunError(f"{source}: {sorted(columns - allowed)[0]!r} is no column of {protocol.name}")


Report = Callable[[Outcome], None]  #: called when a cell is done or has failed


class CellEngine(Interface):
    """Computes cells, in any order, on any machine."""

    def run(self, cells: Sequence[Cell], environment: Environment, report: Report) -> None:
        """Compute every cell and report each once; a failed one must not stop the others."""


@dataclass
class Summary:
    """What a run of a grid did."""

    cached: list[Cell] = field(default_factory=list)  #: cells that were there already
    computed: list[Cell] = field(default_factory=list)  #: cells computed now
    failed: dict[Cell, str] = field(default_factory=dict)  #: message of each failed cell
    notices: list[str] = field(default_factory=list)  #: sentences the user should see


class Grid:
    """The folder of a grid: `cells/*.json`, `cells/*.error.json` and `draws/*.jsonl`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def path(self, cell: Cell) -> Path:
        """The file of a cell's result."""
        return self.folder / "cells" / f"{cell.stem}.json"

    def error_path(self, cell: Cell) -> Path:
        """The file that says why a cell failed."""
        return self.folder / "cells" / f"{cell.stem}.error.json"

    def read(self, cell: Cell) -> Mapping[str, Any] | None:
        """The stored result of a cell, or None where there is none."""
        path = self.path(cell)
        if not path.exists():
            return None
        stored, result = read_cell(path)
        if stored.key != cell.key:
            raise RunError(f"{path}: the configuration does not fit the name of the file")
        return result

    def store(self, outcome: Outcome) -> None:
        """Write a cell's result, or its error, atomically; the few-shot draw goes to a separate file."""
        cell, error = outcome.cell, self.error_path(outcome.cell)
        if outcome.result is None:
            write_json(error, {"key": cell.key, "cell": cell.document(), "error": dict(outcome.error or {})})
            return
        result = dict(outcome.result)
        if "draw" in result:
            result["draw"] = self._store_draw(cell, result["draw"])
        document = {"schema": SCHEMA, "key": cell.key, "cell": cell.document(), "result": result}
        write_json(self.path(cell), document)
        error.unlink(missing_ok=True)

    def _store_draw(self, cell: Cell, draw: Mapping[str, Any]) -> dict[str, Any]:
        """Write the drawn images as JSONL once, and return its name and hash for the cell's record."""
        text = str(draw["jsonl"])
        mark = digest(text)[:12]
        words = re.sub(r"[^A-Za-z0-9.]+", "-", cell.dataset).strip("-.")
        shots = f"{cell.shots}shot" if cell.shots else "all"
        path = self.folder / "draws" / f"{words[-80:]}-{shots}-seed{cell.seed}-{mark}.jsonl"
        if not path.exists():
            write_atomic(path, text)
        rest = {key: value for key, value in draw.items() if key != "jsonl"}
        return {**rest, "file": f"draws/{path.name}", "digest": mark}

    def documents(self) -> Iterator[tuple[Cell, Mapping[str, Any]]]:
        """(cell, result) of every whole cell file in the folder, in the order of names."""
        for path in sorted((self.folder / "cells").glob("*.json")):
            if path.name.endswith(".error.json"):
                continue
            try:
                yield read_cell(path)
            except DearError:
                continue  # reported when the grid runs; a table shows what is whole

    def run(
        self,
        cells: Iterable[Cell],
        environment: Environment,
        engine: CellEngine,
        watch: Callable[[Outcome | None, int, int], None] = lambda outcome, done, total: None,
    ) -> Summary:
        """Compute the cells that are missing and write each the moment it is done; repeated ones count once.

        `watch` is called with (outcome, done, total); outcome is None for the first call.
        """
        summary, missing = Summary(), []
        distinct = list(dict.fromkeys(cells))
        for cell in distinct:
            try:
                result = self.read(cell)
            except DearError as error:
                summary.notices.append(f"{error}; the cell is computed again")
                result = None
            if result is None:
                missing.append(cell)
            else:
                summary.cached.append(cell)
        done = len(summary.cached)
        watch(None, done, len(distinct))

        def report(outcome: Outcome) -> None:
            nonlocal done
            self.store(outcome)
            done += 1
            if outcome.result is None:
                summary.failed[outcome.cell] = str((outcome.error or {}).get("message", "unknown"))
            else:
                summary.computed.append(outcome.cell)
            watch(outcome, done, len(distinct))

        if missing:
            require_writable(self.folder / "cells")
            engine.run(missing, environment, report)
        return summary
