"""Tables before they are written: rows of ours and of the paper, for every protocol and study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dear.bench import published
from dear.bench.ablations import Study
from dear.bench.published import Number
from dear.bench.records import Figure, Line, average, grouped

Entry = Figure | Number | float | None  #: ours over seeds, the paper's, a derived fraction, or nothing

HM_SEEDS, HM_MEANS = "HM (each seed, averaged)", "HM of means"


@dataclass(frozen=True)
class Row:
    """A row: its labels, one entry a column, and whether it is the paper's."""

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


SEEDS_NOTE = "Percent; mean ± sample standard deviation over seeds."
PAPER_NOTE = (
    "Rows marked *published* are the paper's (ViT-B/16 of CLIP, its own runs); the others were run here."
)


def base_to_novel(lines: Sequence[Line]) -> Sheet:
    """Base, novel and both harmonic means of every method on every dataset, and on their average."""
    datasets = list(dict.fromkeys(line.dataset for line in lines))
    paper = published.table("main-2")
    rows: list[Row] = []
    notes: list[str] = []
    blocks = [(name, [line for line in lines if line.dataset == name]) for name in datasets]
    if len(datasets) > 1:
        whole = {key: own for key, own in grouped(lines).items() if len(own) == len(datasets)}
        blocks.insert(0, ("Average", [average(own) for own in whole.values()]))
    eleven = {name for name, _ in paper.rows[0].cells} - {"Average"}
    for dataset, block in blocks:
        for line in block:
            entries = (
                line.figure("base"),
                line.figure("novel"),
                line.figure("hm"),
                line.hm_of_means(),
            )
            rows.append(Row((dataset, line.method, line.mode), entries))
        if dataset != "Average" or set(datasets) == eleven:
            rows += _paper_rows(paper, dataset, ("base", "novel", None, "hm"), notes, mode="")
    averaged = (
        "Average: accuracies are means over datasets; its first HM is the mean of the datasets' HM, its "
        "second the HM of the mean accuracies (as in the paper)."
    )
    extra = ([averaged] if len(datasets) > 1 else []) + ([PAPER_NOTE] if _any(rows) else [])
    columns = ("Base", "Novel", HM_SEEDS, HM_MEANS)
    labels = ("Dataset", "Method", "Mode")
    return Sheet("Base-to-novel", labels, columns, tuple(rows), (SEEDS_NOTE, *extra, *notes))


def few_shot(lines: Sequence[Line]) -> Sheet:
    """Accuracy of every method on every dataset against the number of shots, and on their average."""
    shots = sorted({line.shots for line in lines})
    datasets = list(dict.fromkeys(line.dataset for line in lines))
    rows: list[Row] = []
    for dataset in datasets:
        for (method, mode), own in grouped(line for line in lines if line.dataset == dataset).items():
            at = {line.shots: line.figure("accuracy") for line in own}
            rows.append(Row((dataset, method, mode), tuple(at.get(count) for count in shots)))
    if len(datasets) > 1:
        means = []
        for (method, mode), own in grouped(lines).items():
            entries: list[Entry] = []
            for count in shots:
                there = [line for line in own if line.shots == count]
                whole = len(there) == len(datasets)
                entries.append(average(there).figure("accuracy") if whole else None)
            means.append(Row(("Average", method, mode), tuple(entries)))
        rows = means + rows
    columns = tuple(f"{count} shot{'s' if count > 1 else ''}" for count in shots)
    return Sheet("Few-shot", ("Dataset", "Method", "Mode"), columns, tuple(rows), (SEEDS_NOTE,))


def transfer(lines: Sequence[Line], protocol: str) -> Sheet:
    """Accuracy on the source and the targets; the average is over the targets."""
    datasets = list(dict.fromkeys(line.dataset for line in lines))
    source, targets = datasets[0], datasets[1:]
    rows = []
    for (method, mode), own in grouped(lines).items():
        at = {line.dataset: line for line in own}
        there = [at[name] for name in targets if name in at]
        mean = average(there).figure("accuracy") if len(there) == len(targets) else None
        entries = [at[name].figure("accuracy") if name in at else None for name in datasets]
        rows.append(Row((method, mode), (entries[0], mean, *entries[1:])))
    paper, notes = published.for_protocol(protocol), []
    if paper is not None and source == "ImageNet":
        names = {name for name, _ in paper.rows[0].cells} - {"ImageNet", "Average"}
        wanted = [source, "Average" if set(targets) == names else "", *targets]
        for row in paper.rows:
            numbers = tuple(row.number(name, "accuracy") for name in wanted)
            rows.append(Row((_label(row), "decoupled" if row.method == "dear" else ""), numbers, True))
        notes.append(PAPER_NOTE)
    title = {"cross-dataset": "Cross-dataset", "domain-shift": "Domain shift"}[protocol]
    columns = (f"{source} (source)", "Average of targets", *targets)
    return Sheet(title, ("Method", "Mode"), columns, tuple(rows), (SEEDS_NOTE, *notes))


def held_out(lines: Sequence[Line]) -> Sheet:
    """Accuracy on each domain when it was left out, their average, and the validation accuracy."""
    datasets = list(dict.fromkeys(line.dataset.rpartition("/")[0] for line in lines))
    rows = []
    paper = published.table("purification")
    for dataset in datasets:
        own = [line for line in lines if line.dataset.rpartition("/")[0] == dataset]
        domains = list(dict.fromkeys(line.dataset for line in own))
        for (method, mode), block in grouped(own).items():
            at = {line.dataset: line for line in block}
            whole = len(at) == len(domains)
            mean = average(block).figure("target") if whole else None
            checked = average(block).figure("validation") if whole else None
            for domain in domains:
                entry = at[domain].figure("target") if domain in at else None
                rows.append(Row((dataset, domain.rpartition("/")[2], method, mode), (entry, None)))
            rows.append(Row((dataset, "Average", method, mode), (mean, checked)))
        for row in paper.rows:
            number = row.number(dataset, "target")
            if number is not None:
                rows.append(Row((dataset, "Average", row.label, ""), (number, None), True))
    labels = ("Dataset", "Held-out domain", "Method", "Mode")
    note = "Validation: a fifth of the source domains, never the target."
    return Sheet("Leave one domain out", labels, ("Accuracy", "Validation"), tuple(rows), (SEEDS_NOTE, note))


def ablation(study: Study, lines: Sequence[Line]) -> Sheet:
    """Variants of a study, on every dataset and on their average, with the paper's row beside each."""
    datasets = list(dict.fromkeys(line.dataset for line in lines))
    paper = published.for_study(study.name)
    modes = {variant.name: variant.mode for variant in study.variants}
    chosen = [line for line in lines if line.mode == (modes[line.method] or _usual(lines))]
    rows: list[Row] = []
    for variant in study.variants:
        own = [line for line in chosen if line.method == variant.name]
        shown = ([average(own)] if len(own) == len(datasets) > 1 else []) + own
        for line in shown:
            entries: tuple[Entry, ...] = (
                line.figure("base"),
                line.figure("novel"),
                line.figure("hm"),
                line.hm_of_means(),
            )
            rows.append(Row((line.dataset, variant.name), entries))
    order = {name: place for place, name in enumerate(["Average", *datasets])}
    rows.sort(key=lambda row: order[row.labels[0]])  # stable: variants keep their order
    notes = [SEEDS_NOTE, study.question]
    if study.paper:
        notes.append(f"The paper: {study.paper}")
    if paper is not None:
        for row in paper.rows:
            where = next(iter(row.cells))[0]
            numbers = tuple(row.number(where, c) if c else None for c in ("base", "novel", None, "hm"))
            set_name = "eleven sets" if where == "Average" else where
            rows.append(Row((f"paper: {set_name}", row.variant or row.label), numbers, True))
    columns = ("Base", "Novel", HM_SEEDS, HM_MEANS)
    return Sheet(study.title, ("Dataset", "Variant"), columns, tuple(rows), tuple(notes))


SHEETS: dict[str, Callable[[Sequence[Line]], Sheet]] = {
    "base-to-novel": base_to_novel,
    "few-shot": few_shot,
    "cross-dataset": lambda lines: transfer(lines, "cross-dataset"),
    "domain-shift": lambda lines: transfer(lines, "domain-shift"),
    "leave-one-domain-out": held_out,
}
"""The table of each protocol."""


def _usual(lines: Sequence[Line]) -> str:
    """The first mode that appears: the method's usual one."""
    return lines[0].mode


def _label(row: published.Row) -> str:
    return f"{row.label} ({row.venue})" if row.venue else row.label


def _any(rows: Sequence[Row]) -> bool:
    return any(row.published for row in rows)


def _paper_rows(
    paper: published.Table, dataset: str, columns: Sequence[str | None], notes: list[str], mode: str
) -> list[Row]:
    """The paper's rows for a dataset; corrected numbers add a note."""
    rows = []
    for row in paper.rows:
        numbers = tuple(row.number(dataset, column) if column else None for column in columns)
        if all(number is None for number in numbers):
            continue
        rows.append(Row((dataset, _label(row), mode), numbers, True))
        for column, number in zip(columns, numbers, strict=True):
            if number is not None and number.note:
                notes.append(
                    f"Published {row.label}, {dataset}, {column}: printed {number.printed:.2f}, corrected to "
                    f"{number.value:.2f} ({number.note})."
                )
    return rows
