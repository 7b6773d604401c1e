"""Base class of protocols: plan, work on one cell, table and figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dear.bench.cells import Cell, Data, Pool
from dear.bench.session import Session
from dear.bench.tables import Line, Result, Sheet, gather, variant_names
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.runs.spec import Name
from dear.utils.schema import Strict

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from dear.bench.plan import Request

Figures = list[tuple[str, str, "go.Figure"]]  #: heading, sentence and figure
SEEDS_NOTE = "Percent; mean ± sample standard deviation over seeds."
PAPER_NOTE = (
    "Rows marked *published* are the paper's (ViT-B/16 of CLIP, its own runs); the others were run here."
)


class Setting(Strict, frozen=True):
    """Settings of a cell in addition to its dataset, method, shots and seed."""

    template: Name | None = None  #: prompt template of the dataset, where it is not the dataset's own


class Protocol(ABC):
    """One way to train and test. Everything that differs between protocols is in these methods."""

    name: str  #: as in `Cell.protocol` and on the command line
    title: str  #: heading of its table
    shots: ClassVar[tuple[int, ...]] = (16,)  #: images per class where the user names none; 0 takes all
    setting: ClassVar[type[Setting]] = Setting  #: schema of `Cell.setting`
    shots_are_columns: ClassVar[bool] = False  #: whether its table has a column per number of shots
    tests_by_seed: ClassVar[bool] = False  #: whether the images tested on depend on the seed

    def settings(self, request: Request) -> list[tuple[str, dict[str, Any]]]:
        """The plan: each dataset to train on, with its settings."""
        if request.targets is not None:
            raise UsageError(
                f"targets has no effect in {self.name}, which tests on its datasets; leave it out"
            )
        if not request.datasets:
            raise UsageError(
                f"datasets must name at least one dataset for {self.name}, got none", hint="datasets"
            )
        return [(dataset, {}) for dataset in request.datasets]

    def training(self, data: Data) -> Pool:
        """What a cell's training images are drawn from."""
        return Pool(data.open("train"))

    def testing(self, data: Data) -> list[ImageSet]:
        """The images that a cell is tested on."""
        return [data.open("test")]

    @abstractmethod
    def run(self, session: Session) -> dict[str, Any]:
        """Compute one cell."""

    def columns(self, cell: Cell) -> set[str] | None:
        """The columns that a result of this cell may have; None where any may be there."""
        return None

    def column_of(self, cell: Cell, column: str, shown: Mapping[str, str]) -> tuple[str, str]:
        """(dataset, column) under which a column of a cell's result is shown; `shown` names datasets."""
        return shown[cell.dataset], column

    def gather(
        self, results: Iterable[tuple[Cell, Result]], names: Mapping[str, str] | None = None
    ) -> list[Line]:
        """Lines of this protocol's cells, see `dear.bench.tables.gather`."""
        results = list(results)
        names = variant_names([cell for cell, _ in results]) if names is None else names
        if len({cell.shots for cell, _ in results}) > 1 and not self.shots_are_columns:
            names = {cell.key: f"{names[cell.key]}, {cell.shots or 'all'} shots" for cell, _ in results}
        return gather(results, self.column_of, names)

    @abstractmethod
    def table(self, lines: Sequence[Line]) -> Sheet:
        """The table of some lines, with the paper's rows where it has any."""

    @abstractmethod
    def figures(self, lines: Sequence[Line]) -> Figures:
        """The figures of some lines."""
