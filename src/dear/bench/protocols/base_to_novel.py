"""Base-to-novel: train on the first half of the classes, test on both halves (main text, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import harmonic_mean
from typing import Any

from dear.bench import published
from dear.bench.cells import Data, Pool, select_labels
from dear.bench.protocols import PAPER_NOTE, SEEDS_NOTE, Figures, Protocol
from dear.bench.session import Session
from dear.bench.tables import Entry, Line, Sheet, SheetRow, average, group_lines
from dear.data.shots import halves
from dear.errors import DataError
from dear.runs.evaluation import Evaluation

HM_SEEDS, HM_MEANS = "HM (each seed, averaged)", "HM of means"
JOINT = {"joint": "Joint", "joint_base": "Joint, base", "joint_novel": "Joint, novel", "joint_hm": "Joint HM"}
CALIBRATION = {"ece_base": "ECE base", "ece_novel": "ECE novel", "ece_joint": "ECE joint"}
NOTES = {
    "joint": "Joint: each image is answered among base and novel classes together; joint HM is the harmonic "
    "mean of the accuracies on images of base and of novel classes.",
    "ece_base": "ECE: expected calibration error in percent (15 bins of equal width) under CLIP's own "
    "temperature, without the calibration of an adapted run; lower is better.",
}
AVERAGE_NOTE = (
    "Average: accuracies are means over datasets; its first HM is the mean of the datasets' HM, its "
    "second the HM of the mean accuracies (as in the paper)."
)


class BaseToNovel(Protocol):
    """Base, novel and joint accuracy, harmonic means and calibration, in every mode of the method."""

    name, title = "base-to-novel", "Base-to-novel"

    def training(self, data: Data) -> Pool:
        """The first half of the classes."""
        whole = data.open("train")
        base, novel = halves(range(len(whole.classes)))
        if not novel:
            raise DataError(f"{whole.name}: base-to-novel needs at least 2 classes, got {len(base)}")
        return Pool(whole, base)

    def run(self, session: Session) -> dict[str, Any]:
        """All columns in every mode."""
        model = session.fit(self.training(session.data))
        test = session.open("test")
        base, novel = halves(range(len(test.classes)))
        seen = session.test(model, select_labels(test, base))
        unseen = session.test(model, select_labels(test, novel))
        joint = session.test(model, test)
        assert seen is not None  # the method was trained on these classes
        session.record["classes"] = {"base": len(base), "novel": len(novel)}
        session.record["tested"] = {test.name: len(test)}
        return session.finish(
            {mode: {**_halves(mode, seen, unseen), **_joint(mode, joint, len(base))} for mode in seen.answers}
        )

    def table(self, lines: Sequence[Line]) -> Sheet:
        """Every method on every dataset, and on their average, with the paper's rows."""
        datasets = list(dict.fromkeys(line.dataset for line in lines))
        paper = published.table("main-2")
        rows: list[SheetRow] = []
        notes: list[str] = []
        blocks = [(name, [line for line in lines if line.dataset == name]) for name in datasets]
        if len(datasets) > 1:
            whole = {
                key: method_lines
                for key, method_lines in group_lines(lines).items()
                if len(method_lines) == len(datasets)
            }
            blocks.insert(0, ("Average", [average(method_lines) for method_lines in whole.values()]))
        eleven = {name for name, _ in paper.rows[0].cells} - {"Average"}
        headings = column_headings(lines)
        for dataset, block in blocks:
            rows += [SheetRow((dataset, line.method, line.mode), entries(line, lines)) for line in block]
            if dataset != "Average" or set(datasets) == eleven:
                rows += _paper_rows(paper, dataset, len(headings), notes)
        extra = ([AVERAGE_NOTE] if len(datasets) > 1 else []) + column_notes(lines)
        extra += [PAPER_NOTE] if any(row.published for row in rows) else []
        labels = ("Dataset", "Method", "Mode")
        return Sheet(self.title, labels, headings, tuple(rows), (SEEDS_NOTE, *extra, *notes))

    def figures(self, lines: Sequence[Line]) -> Figures:
        """Harmonic means, and base against novel."""
        from dear.bench import plots

        bars = "Harmonic mean of each seed, averaged; whiskers are the standard deviation over seeds."
        curves = "Up is better on classes never trained, right on trained ones; curves join equal HM."
        return [
            ("Harmonic mean", bars, plots.bars(lines, "hm")),
            ("Base against novel", curves, plots.base_novel_scatter(lines)),
        ]


def _halves(mode: str, seen: Evaluation, unseen: Evaluation | None) -> dict[str, float | None]:
    """Columns of images that are predicted among the classes of their half."""
    base = seen.accuracy[mode]
    novel = None if unseen is None else unseen.accuracy[mode]
    return {
        "base": base,
        "novel": novel,
        "hm": None if novel is None else harmonic_mean((base, novel)),
        "ece_base": seen.calibration_errors(mode)["ece"],
        "ece_novel": None if unseen is None else unseen.calibration_errors(mode)["ece"],
    }


def _joint(mode: str, joint: Evaluation | None, bases: int) -> dict[str, float | None]:
    """Columns of images answered among all classes, of which the first `bases` were trained."""
    if joint is None:
        return dict.fromkeys([*JOINT, "ece_joint"])
    right = (joint.answers[mode] == joint.labels).double()
    trained = joint.labels < bases
    base, novel = float(right[trained].mean()), float(right[~trained].mean())
    return {
        "joint": joint.accuracy[mode],
        "joint_base": base,
        "joint_novel": novel,
        "joint_hm": harmonic_mean((base, novel)),
        "ece_joint": joint.calibration_errors(mode)["ece"],
    }


def _extra_columns(lines: Sequence[Line]) -> dict[str, str]:
    """The columns beyond the harmonic means that any line has, with their headings."""
    every = {**JOINT, **CALIBRATION}
    return {column: head for column, head in every.items() if any(line.seeds(column) for line in lines)}


def column_headings(lines: Sequence[Line]) -> tuple[str, ...]:
    """Headings of the columns of `entries`."""
    return ("Base", "Novel", HM_SEEDS, HM_MEANS, *_extra_columns(lines).values())


def column_notes(lines: Sequence[Line]) -> list[str]:
    """What the columns beyond the harmonic means are."""
    return [NOTES[column] for column in _extra_columns(lines) if column in NOTES]


def entries(line: Line, lines: Sequence[Line]) -> tuple[Entry, ...]:
    """A line's part of a table that shows `lines`."""
    base, novel = line.figure("base"), line.figure("novel")
    of_means = None if base is None or novel is None else harmonic_mean((base.mean, novel.mean))
    return (base, novel, line.figure("hm"), of_means, *(line.figure(c) for c in _extra_columns(lines)))


def _paper_rows(
    paper: published.PublishedTable, dataset: str, width: int, notes: list[str]
) -> list[SheetRow]:
    """The paper's rows for a dataset, filled up to `width` columns; corrected numbers add a note."""
    rows = []
    for row in (row for first in paper.rows for row in (first, *paper.reruns_of(first.label))):
        numbers = paper_entries(row, dataset, width)
        if all(number is None for number in numbers):
            continue
        rows.append(SheetRow((dataset, row.title, ""), numbers, True))
        if row.source:
            notes.append(f"Published {row.title}, {dataset}: {row.source}.")
        notes += [
            f"Published {row.label}, {dataset}, {column}: printed {number.printed:.2f}, corrected to "
            f"{number.value:.2f} ({number.note})."
            for column, number in ((c, row.number(dataset, c)) for c in ("base", "novel", "hm"))
            if number is not None and number.note
        ]
    return rows


def paper_entries(row: published.PublishedRow, dataset: str, width: int) -> tuple[Entry, ...]:
    """A published row's numbers under the columns of `entries`."""
    numbers = tuple(row.number(dataset, c) if c else None for c in ("base", "novel", None, "hm"))
    return numbers + (None,) * (width - len(numbers))
