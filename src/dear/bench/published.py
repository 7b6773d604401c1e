"""The paper's tables as data: what is printed, what its own columns say, and a note where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from dear.errors import UsageError
from dear.utils.schema import parse_json


@dataclass(frozen=True)
class Number:
    """One printed number, in percent."""

    value: float  #: what to compare with: the printed number, or the corrected one where it is a slip
    printed: float  #: as printed in the paper
    note: str = ""  #: why the two differ; empty where they do not
    std: float | None = None  #: standard deviation over seeds, if the paper reports one


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published table."""

    label: str  #: the name in the paper
    method: str | None  #: our name of the method, or None where we have none
    variant: str | None  #: our name of an ablation's variant, or None
    venue: str  #: where the method was published, or ""
    #: number of each (dataset, column); the dataset "Average" is the mean row
    cells: Mapping[tuple[str, str], Number]
    mode: str = ""  #: the way to predict that the paper names for this row, or ""
    unlabeled: bool = False  #: whether the method also learns from unlabeled images of new classes
    source: str = ""  #: where others published this rerun of the authors' code; "" for the authors' figures

    @property
    def title(self) -> str:
        """The name with the venue, and what sets the row apart from the others."""
        title = f"{self.label} ({self.venue})" if self.venue else self.label
        title += ", rerun by others" if self.source else ""
        return title + (", unlabeled images of new classes" if self.unlabeled else "")

    def number(self, dataset: str, column: str) -> Number | None:
        """The number of a dataset and column, or None if the paper reports none."""
        return self.cells.get((dataset, column))


@dataclass(frozen=True)
class PublishedTable:
    """A published table: `name` as in "main-2" or "supplement-5", its columns and its rows."""

    name: str
    title: str
    protocol: str
    study: str | None
    columns: tuple[str, ...]
    rows: tuple[PublishedRow, ...]
    reruns: tuple[PublishedRow, ...] = ()  #: of rows, by their labels

    def row(self, label: str) -> PublishedRow:
        """The row with that label in the paper."""
        for row in self.rows:
            if row.label == label:
                return row
        raise UsageError(f"table {self.name} has no row {label!r}; it has {[row.label for row in self.rows]}")

    def reruns_of(self, label: str) -> tuple[PublishedRow, ...]:
        """What others measured for the method of a row with the authors' code."""
        return tuple(row for row in self.reruns if row.label == label)


@cache
def _document() -> Mapping[str, Any]:
    text = resources.files("dear.bench").joinpath("published.json").read_text(encoding="utf-8")
    document: Mapping[str, Any] = parse_json(text, "published.json", "table of published numbers")
    return document


def slips() -> tuple[Mapping[str, Any], ...]:
    """Printed numbers that the paper's own columns contradict: table, row, dataset, column, printed, ..."""
    return tuple(_document()["slips"])


def claims() -> tuple[Mapping[str, Any], ...]:
    """Sentences of the paper whose figure its tables do not give."""
    return tuple(_document()["claims"])


@cache
def table(name: str) -> PublishedTable:
    """A published table with its slips corrected and noted.

    >>> dear = table("main-2").row("DeAR")
    >>> number = dear.number("Caltech101", "hm")
    >>> number.printed, number.value
    (96.95, 97.37)
    """
    stored = _document()["tables"]
    if name not in stored:
        raise UsageError(f"no published table {name!r}; there are {', '.join(stored)}")
    raw = stored[name]
    corrections = {
        (slip["row"], slip["dataset"], slip["column"]): slip for slip in slips() if slip["table"] == name
    }
    rows = []
    for entry in raw["rows"]:
        cells: dict[tuple[str, str], Number] = {}
        for dataset, values in entry["values"].items():
            deviations = entry.get("std", {}).get(dataset, [None] * len(values))
            for column, value, std in zip(raw["columns"], values, deviations, strict=True):
                slip = corrections.get((entry["label"], dataset, column))
                cells[dataset, column] = (
                    Number(value, value, std=std)
                    if slip is None
                    else Number(slip["corrected"], value, slip["note"], std)
                )
        names = (entry["label"], entry.get("method"), entry.get("variant"), entry.get("venue", ""))
        rows.append(PublishedRow(*names, cells, entry.get("mode", ""), entry.get("unlabeled", False)))
    return PublishedTable(
        name,
        raw["title"],
        raw["protocol"],
        raw.get("study"),
        tuple(raw["columns"]),
        tuple(rows),
        _reruns(name, raw["columns"]),
    )


def _reruns(table: str, columns: Sequence[str]) -> tuple[PublishedRow, ...]:
    """What others measured with the authors' code, as rows of a table."""
    rows = []
    for entry in _document()["reruns"]:
        if entry["table"] == table:
            cells = {
                (dataset, column): Number(value, value)
                for dataset, values in entry["values"].items()
                for column, value in zip(columns, values, strict=True)
            }
            rows.append(PublishedRow(entry["label"], None, None, "", cells, source=entry["source"]))
    return tuple(rows)


def tables() -> tuple[PublishedTable, ...]:
    """All stored tables, in the order of the paper."""
    return tuple(table(name) for name in _document()["tables"])


def for_protocol(protocol: str) -> PublishedTable | None:
    """The main table of a protocol (not of an ablation), or None where the paper has none."""
    return next((table for table in tables() if table.protocol == protocol and table.study is None), None)


def for_study(study: str) -> PublishedTable | None:
    """The published table of an ablation study, or None where the paper has none."""
    return next((table for table in tables() if table.study == study), None)
