"""Leave one domain out: train on the other domains, test on the one that was never seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dear.bench import published
from dear.bench.cells import Cell, Data, Pool
from dear.bench.protocols import SEEDS_NOTE, Figures, Protocol, Setting
from dear.bench.session import Session
from dear.bench.tables import Line, Sheet, SheetRow, average, group_lines
from dear.data.duplicates import find_duplicates, find_file_duplicates
from dear.data.images import FileImages, ImageSet, select_domains
from dear.data.open import find_benchmark, open_data
from dear.data.shots import hold_out
from dear.errors import DataError
from dear.runs.spec import Name

if TYPE_CHECKING:
    from dear.bench.plan import Request

VALIDATION = 0.2  #: share of the sources kept for validation


class HeldOutSetting(Setting, frozen=True, kw_only=True):
    """The domain that is left out of training."""

    held_out: Name


class HeldOutDomain(Protocol):
    """Accuracy on each domain when it is the one left out of training."""

    name, title = "leave-one-domain-out", "Leave one domain out"
    shots: ClassVar[tuple[int, ...]] = (0,)
    setting: ClassVar[type[Setting]] = HeldOutSetting
    tests_by_seed: ClassVar[bool] = True

    def settings(self, request: Request) -> list[tuple[str, dict[str, Any]]]:
        """Each domain of each dataset is left out once."""
        planned = []
        for dataset, _ in super().settings(request):
            images = open_data(dataset, splits_of(dataset)[0], root=request.data_root)
            planned += [(dataset, {"held_out": domain}) for domain in domains_of(images)]
        return planned

    def training(self, data: Data) -> Pool:
        """The training part of the sources."""
        return Pool(_sources(data)[0])

    def testing(self, data: Data) -> list[ImageSet]:
        """The validation part of the sources, and the target."""
        target = data.open(splits_of(data.dataset)[1])
        return [_sources(data)[1], select_domains(target, (str(data.setting["held_out"]),))]

    def run(self, session: Session) -> dict[str, Any]:
        """Accuracy on the held-out domain, and on the validation part of the sources, in every mode.

        Nothing is learned from the target's images.
        """
        model = session.fit(self.training(session.data))
        validation, target = self.testing(session.data)
        checked, tested = session.test(model, validation), session.test(model, target)
        modes: dict[str, dict[str, float | None]] = {
            mode: {
                "target": None if tested is None else tested.accuracy[mode],
                "validation": None if checked is None else checked.accuracy[mode],
            }
            for mode in model.modes
        }
        session.record["sources"] = sorted(set(validation.domains or ()))
        return session.finish(modes)

    def column_of(self, cell: Cell, column: str, shown: Mapping[str, str]) -> tuple[str, str]:
        """The held-out domain belongs to the dataset's name."""
        return f"{shown[cell.dataset]}/{cell.setting['held_out']}", column

    def table(self, lines: Sequence[Line]) -> Sheet:
        """Accuracy on each domain when it was left out, their average, and the validation accuracy."""
        rows = []
        paper = published.table("purification")
        for dataset in dict.fromkeys(line.dataset.rpartition("/")[0] for line in lines):
            dataset_lines = [line for line in lines if line.dataset.rpartition("/")[0] == dataset]
            domains = list(dict.fromkeys(line.dataset for line in dataset_lines))
            for (method, mode), block in group_lines(dataset_lines).items():
                at = {line.dataset: line for line in block}
                whole = len(at) == len(domains)
                mean = average(block).figure("target") if whole else None
                checked = average(block).figure("validation") if whole else None
                for domain in domains:
                    entry = at[domain].figure("target") if domain in at else None
                    rows.append(SheetRow((dataset, domain.rpartition("/")[2], method, mode), (entry, None)))
                rows.append(SheetRow((dataset, "Average", method, mode), (mean, checked)))
            for row in paper.rows:
                number = row.number(dataset, "target")
                if number is not None:
                    rows.append(SheetRow((dataset, "Average", row.label, ""), (number, None), True))
        labels = ("Dataset", "Held-out domain", "Method", "Mode")
        note = "Validation: a fifth of the source domains, never the target."
        return Sheet(self.title, labels, ("Accuracy", "Validation"), tuple(rows), (SEEDS_NOTE, note))

    def figures(self, lines: Sequence[Line]) -> Figures:
        """Accuracy on each unseen domain."""
        from dear.bench import plots

        sentence = "Accuracy on each domain when it is the one left out of training."
        return [("Accuracy on the unseen domain", sentence, plots.bars(lines, "target"))]


def _sources(data: Data) -> tuple[ImageSet, ImageSet]:
    """(training, validation) of the domains that are not held out."""
    whole = data.open(splits_of(data.dataset)[0])
    names = [name for name in domains_of(whole) if name != data.setting["held_out"]]
    return split_sources(select_domains(whole, names), data.seed)


def splits_of(dataset: str) -> tuple[str, str]:
    """(split of the sources, split of the target): DomainBed publishes no split and takes all of both."""
    benchmark = find_benchmark(dataset)
    return ("all", "all") if benchmark is not None and benchmark.domains else ("train", "test")


def domains_of(images: ImageSet) -> tuple[str, ...]:
    """Names of a dataset's domains, sorted."""
    names = tuple(sorted(set(images.domains or ())))
    if len(names) < 2:
        raise DataError(
            f"{images.name}: leaving one domain out needs two domains, got {len(names)}; add domains"
        )
    return names


def split_sources(images: ImageSet, seed: int) -> tuple[ImageSet, ImageSet]:
    """(training, validation) of the source domains: a fifth of each class of each domain is held back.

    Which images depends on their names, their copies, and the seed alone; copies are on one side.
    """
    keys = [f"{seed}/{images.key(index)}" for index in range(len(images))]
    groups = list(zip(images.labels.tolist(), images.domains or (), strict=True))
    if isinstance(images, FileImages):
        copies = find_file_duplicates([images.path(index) for index in range(len(images))])
    else:
        copies = find_duplicates(images)
    held = hold_out(keys, groups, VALIDATION, copies.units)
    return (
        images.subset([index for index, out in enumerate(held) if not out]),
        images.subset([index for index, out in enumerate(held) if out]),
    )
