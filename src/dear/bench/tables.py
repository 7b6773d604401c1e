"""Tables: rows of ours and of the paper, written as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path

from dear._io.files import write_atomic
from dear.bench.published import Number
from dear.bench.records import Figure

Entry = Figure | Number | float | None  #: ours over seeds, the paper's, a derived fraction, or nothing


@dataclass(frozen=True)
class Row:
    """A row: its labels, one entry per column, and whether it is the paper's."""

    labels: tuple[str, ...]
    entries: tuple[Entry, ...]
    published: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        title: heading.
        labels: headings of the label columns.
        columns: headings of the number columns.
        rows: rows; consecutive rows with the same first label belong together.
        notes: sentences below the table.
    """

    title: str
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def text(entry: Entry, plus_minus: str = " ± ") -> str:
    """A number as it stands in a table, in percent with two decimals.

    >>> text(Figure(0.8594, 0.0021, 3)), text(None), text(0.5)
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
        cells = [*(_cell(label) for label in _labels(row)), *(text(entry) for entry in row.entries)]
        if row.published:
            cells = [f"*{cell}*" if cell and cell != "–" else cell for cell in cells]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"- {_cell(note)}" for note in sheet.notes]
    return "\n".join(lines) + "\n"


def _cell(label: str) -> str:
    """Text that cannot end a cell of a Markdown table early."""
    return label.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _labels(row: Row) -> list[str]:
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
        cells = [part for entry in row.entries for part in _parts(entry)]
        writer.writerow([*(_harmless(label) for label in row.labels), int(row.published), *cells])
    return out.getvalue()


def _parts(entry: Entry) -> tuple[str, str, str, str]:
    """(value, std, seeds, printed): exact digits, published numbers as fractions too."""
    if entry is None:
        return "", "", "", ""
    if isinstance(entry, Number):
        std = "" if entry.std is None else f"{entry.std / 100:.6g}"
        return f"{entry.value / 100:.6g}", std, "", f"{entry.printed / 100:.6g}"
    if isinstance(entry, Figure):
        return repr(entry.mean), "" if entry.std is None else repr(entry.std), str(entry.seeds), ""
    return repr(entry), "", "", ""


def _harmless(label: str) -> str:
    """A label that a spreadsheet does not take for a formula."""
    return f"'{label}" if label[:1] in ("=", "+", "-", "@", "\t") else label


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
        cells = [_escape(cell) for cell in (*_labels(row), *(text(entry) for entry in row.entries))]
        if row.published:
            cells = [rf"\textit{{{cell}}}" if cell else cell for cell in cells]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def write_tables(sheets: list[Sheet], folder: Path, stem: str) -> list[Path]:
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
