"""Transfer: train on one dataset, test on others (cross-dataset), or on its variants (domain shift)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta

from dear.bench import published
from dear.bench.cells import Cell, Data
from dear.bench.protocols import PAPER_NOTE, SEEDS_NOTE, Figures, Protocol, Setting
from dear.bench.session import Session
from dear.bench.tables import Line, Sheet, SheetRow, average, group_lines
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.runs.spec import Name

if TYPE_CHECKING:
    from dear.bench.plan import Request

SOURCE = "ImageNet"
TARGETS = (
    "Caltech101", "OxfordPets", "StanfordCars", "OxfordFlowers", "Food101", "FGVCAircraft", "SUN397",
    "DescribableTextures", "EuroSAT", "UCF101",
)  # fmt: skip
VARIANTS = ("ImageNetV2", "ImageNetSketch", "ImageNetA", "ImageNetR")


class TransferSetting(Setting, frozen=True, kw_only=True):
    """The datasets tested on."""

    targets: Annotated[list[Name], Meta(min_length=1)]


class Transfer(Protocol):
    """Accuracy on the source and on each target; `targets` are those where the user names none."""

    setting: ClassVar[type[Setting]] = TransferSetting

    def __init__(self, name: str, title: str, targets: tuple[str, ...]) -> None:
        self.name, self.title, self.targets = name, title, targets

    def settings(self, request: Request) -> list[tuple[str, dict[str, Any]]]:
        """One source and its targets."""
        if len(request.datasets) > 1:
            names = ", ".join(request.datasets)
            raise UsageError(
                f"datasets must name one dataset for {self.name}, got {names}",
                hint="targets",
            )
        source = request.datasets[0] if request.datasets else SOURCE
        targets = list(self.targets if request.targets is None else request.targets)
        if not targets or source in targets:
            raise UsageError(
                f"targets must name datasets other than {source} for {self.name}", hint="targets"
            )
        return [(source, {"targets": targets})]

    def testing(self, data: Data) -> list[ImageSet]:
        """The source's test images, and those of each target."""
        return [data.open("test", dataset) for dataset in (data.dataset, *data.setting["targets"])]

    def run(self, session: Session) -> dict[str, Any]:
        """Accuracy on the source and on each target, by mode and dataset.

        Each target is answered among exactly its own classes: of ImageNet's thousand, ImageNet-A and -R have
        two hundred, and an answer outside them would be wrong by definition. The modes share the image
        tower's work; the texts of a dataset are encoded once.
        """
        model = session.fit(self.training(session.data), keep=True)
        modes: dict[str, dict[str, float | None]] = {mode: {} for mode in model.modes}
        for dataset in (session.cell.dataset, *session.cell.setting["targets"]):
            tested = session.test(model, session.open("test", dataset))
            for mode, row in modes.items():
                row[dataset] = None if tested is None else tested.accuracy[mode]
        return session.finish(modes)

    def columns(self, cell: Cell) -> set[str] | None:
        """The source and the targets."""
        return {cell.dataset, *cell.setting["targets"]}

    def column_of(self, cell: Cell, column: str, shown: Mapping[str, str]) -> tuple[str, str]:
        """A column of a result is a dataset."""
        return shown[column], "accuracy"

    def table(self, lines: Sequence[Line]) -> Sheet:
        """Accuracy on the source and the targets; the average is over the targets."""
        datasets = list(dict.fromkeys(line.dataset for line in lines))
        source, targets = datasets[0], datasets[1:]
        rows = []
        for (method, mode), method_lines in group_lines(lines).items():
            at = {line.dataset: line for line in method_lines}
            tested = [at[name] for name in targets if name in at]
            mean = average(tested).figure("accuracy") if tested and len(tested) == len(targets) else None
            entries = [at[name].figure("accuracy") if name in at else None for name in datasets]
            rows.append(SheetRow((method, mode), (entries[0], mean, *entries[1:])))
        paper, notes = published.for_protocol(self.name), []
        if paper is not None and source == SOURCE:
            names = {name for name, _ in paper.rows[0].cells} - {SOURCE, "Average"}
            wanted = [source, "Average" if set(targets) == names else "", *targets]
            for row in paper.rows:
                numbers = tuple(row.number(name, "accuracy") for name in wanted)
                rows.append(SheetRow((row.title, row.mode), numbers, True))
            notes.append(PAPER_NOTE)
        columns = (f"{source} (source)", "Average of targets", *targets)
        return Sheet(self.title, ("Method", "Mode"), columns, tuple(rows), (SEEDS_NOTE, *notes))

    def figures(self, lines: Sequence[Line]) -> Figures:
        """Accuracy by dataset."""
        from dear.bench import plots

        sentence = "Trained on the first dataset; the others were never seen in training."
        return [("Accuracy by dataset", sentence, plots.bars(lines, "accuracy"))]


CROSS_DATASET = Transfer("cross-dataset", "Cross-dataset", TARGETS)
DOMAIN_SHIFT = Transfer("domain-shift", "Domain shift", VARIANTS)
