"""What was measured about an adapted model; `dear.tasks.run_report.examine` measures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dear.report.page import iframe
from dear.utils.files import PathLike, write_atomic

if TYPE_CHECKING:
    import pandas as pd

    from dear.data.images import ImageSet
    from dear.runs.evaluation import Evaluation


@dataclass(frozen=True)
class Compared:
    """The adapted model and the frozen one on the same images."""

    images: ImageSet  #: the images
    adapted: Evaluation  #: what the adapted model answered, in every mode
    frozen: Evaluation  #: what zero-shot CLIP answered
    mode: str  #: the mode the report is about

    @property
    def answers(self) -> Tensor:
        """The adapted model's answers, [n]."""
        return self.adapted.answers[self.mode]

    @property
    def before(self) -> Tensor:
        """The frozen model's answers, [n]."""
        return self.frozen.answers["default"]

    @property
    def labels(self) -> Tensor:
        """The truth, [n]."""
        return self.adapted.labels

    def accuracies(self) -> dict[str, float]:
        """Accuracy of zero-shot CLIP and of every mode of the adapted model."""
        return {"zero-shot": self.frozen.accuracy["default"], **self.adapted.accuracy}

    def changes(self) -> dict[str, list[int]]:
        """Images by what the adaptation did to them: kept, fixed, broken, missed."""
        now, then = self.answers == self.labels, self.before == self.labels
        groups = {"kept": now & then, "fixed": now & ~then, "broken": ~now & then, "missed": ~now & ~then}
        return {name: rows.nonzero()[:, 0].tolist() for name, rows in groups.items()}

    def most_wrong(self, count: int) -> list[int]:
        """Images answered wrongly, the most confident first."""
        wrong = (self.answers != self.labels).nonzero()[:, 0]
        order = self.adapted.confidence[self.mode][wrong].argsort(descending=True, stable=True)
        return wrong[order][:count].tolist()

    def confusion(self) -> Tensor:
        """Images of class i answered as class j, [C, C]."""
        size = len(self.adapted.classes)
        flat = torch.bincount(self.labels * size + self.answers, minlength=size * size)
        return flat.view(size, size)

    def confused_pairs(self, count: int) -> list[tuple[str, str, int, int]]:
        """(truth, answer, images, images of that truth) of the most frequent mistakes."""
        table, classes = self.confusion(), self.adapted.classes
        totals = table.sum(dim=1)
        wrong = table.clone().fill_diagonal_(0).flatten()
        order = wrong.argsort(descending=True, stable=True)[:count].tolist()
        size = len(classes)
        return [
            (classes[place // size], classes[place % size], int(wrong[place]), int(totals[place // size]))
            for place in order
            if wrong[place] > 0
        ]

    def class_changes(self) -> list[tuple[str, float, float]]:
        """(class, accuracy before, accuracy after), the largest loss first, the largest gain last."""
        before, after = self.frozen.per_class["default"], self.adapted.per_class[self.mode]
        rows = [(name, before[name], after[name]) for name in after if name in before]
        return sorted(rows, key=lambda row: (row[2] - row[1], row[0]))


@dataclass(frozen=True)
class NewClasses:
    """What happens to new classes: those the adapter was not trained on."""

    alone: Compared  #: answers among the new classes only
    #: answers among trained and new classes together; None where they have a class in common
    among_all: Compared | None
    trained: int  #: how many classes of `among_all` were trained

    def taken_for_trained(self) -> dict[str, float]:
        """Share of images of new classes answered as a trained class, by zero-shot CLIP and each mode."""
        if self.among_all is None:
            return {}
        both = self.among_all
        every = {"zero-shot": both.before, **both.adapted.answers}
        return {name: float((answers < self.trained).double().mean()) for name, answers in every.items()}


@dataclass(frozen=True)
class RunFacts:
    """Everything a report about one adapted model shows."""

    method: str  #: title of the method
    classes: tuple[str, ...]  #: the classes it was trained on
    backbone: str  #: name and fingerprint of the frozen backbone
    template: str  #: prompt with `{}`
    parameters: int  #: how many parameters were learned
    trained: Compared  #: answers on the classes it was trained on
    new: NewClasses | None = None  #: answers on new classes; None with the reason in `why_no_new`
    why_no_new: str = ""  #: why new classes were not measured
    #: weights of class token and attributes; empty for methods without fusion
    fusion_weights: Mapping[str, float] = field(default_factory=dict)
    #: gates of the heads after each epoch [epochs, L, H]; None for methods without gates
    gates: Tensor | None = None
    zero_shot: bool = False  #: nothing was adapted: it is the frozen model itself

    def to_frame(self) -> pd.DataFrame:
        """One row per trained class: accuracy of zero-shot and of every mode. Needs pandas."""
        import pandas as pd

        columns = {"zero-shot": self.trained.frozen.per_class["default"], **self.trained.adapted.per_class}
        return pd.DataFrame(columns).rename_axis("class").reset_index()

    def write_page(
        self,
        path: PathLike,
        log: Sequence[Mapping[str, float | int]] = (),
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Write the page to a file, whole or not at all; `log` and `notes` as for `run_page`."""
        from dear.tasks.run_report.page import run_page

        write_atomic(path, run_page(self, log, notes))

    def _repr_html_(self) -> str:
        from dear.tasks.run_report.page import run_page

        return iframe(run_page(self))
