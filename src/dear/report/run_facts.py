"""What there is to say about an adapted model, measured: no HTML and no figures here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dear._io.progress import Progress
from dear.errors import DataError
from dear.methods.base import Method
from dear.methods.zeroshot import ZeroShot
from dear.train.evaluate import Evaluation, evaluate

if TYPE_CHECKING:
    from dear.data.images import ImageSet


@dataclass(frozen=True)
class Compared:
    """The adapted model and the frozen one on the same images.

    Attributes:
        images: the images.
        adapted: what the adapted model answered, in every mode.
        frozen: what zero-shot CLIP answered.
        mode: the mode the report is about.
    """

    images: ImageSet
    adapted: Evaluation
    frozen: Evaluation
    mode: str

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
        """(truth, answer, images, images of that truth) of the commonest mistakes."""
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


@dataclass(frozen=True)
class Unseen:
    """What happens to classes the adapter was not trained on.

    Attributes:
        alone: answers among the unseen classes only.
        among_all: answers among trained and unseen classes together; None where nothing is shared.
        trained: how many classes of `among_all` were trained.
    """

    alone: Compared
    among_all: Compared | None
    trained: int

    def drawn_to_trained(self) -> dict[str, float]:
        """Share of unseen images that are answered as a trained class, by zero-shot CLIP and each mode."""
        if self.among_all is None:
            return {}
        both = self.among_all
        every = {"zero-shot": both.before, **both.adapted.answers}
        return {name: float((answers < self.trained).double().mean()) for name, answers in every.items()}


@dataclass(frozen=True)
class RunFacts:
    """Everything a report about one adapted model shows.

    Attributes:
        method: the adapted model.
        mode: the mode the report is about.
        seen: on the classes it was trained on.
        unseen: on others; None with the reason in `why_no_unseen`.
    """

    method: Method
    mode: str
    seen: Compared
    unseen: Unseen | None
    why_no_unseen: str = ""

    @property
    def fusion_weights(self) -> dict[str, float]:
        """Weights of class token and attributes; empty for methods without fusion."""
        weights = self.method.facts().get("fusion_weights", {})
        return {str(name): float(value) for name, value in weights.items()}


def examine(
    method: Method,
    images: ImageSet,
    other: ImageSet | None = None,
    mode: str | None = None,
    progress: Progress | None = None,
) -> RunFacts:
    """Measure an adapted model against the frozen one.

    Args:
        method: the adapted model.
        images: labeled test images; those of classes the model does not know count as unseen.
        other: another set, all of whose classes count as unseen.
        mode: the mode to report on; None for the usual one.
        progress: told ("images", images done, images in all).

    Raises:
        DataError: no image is of a class the model was trained on.
    """
    mode = method.pick_mode(mode)
    known = [name for name in images.classes if name in set(method.classes)]
    new = [name for name in images.classes if name not in set(method.classes)]
    if not known:
        raise DataError(
            f"{images.name}: has none of the model's classes ({', '.join(method.classes[:3])}…); "
            "give images of the classes it was trained for",
            hint="report-data",
        )
    seen_images = images if not new else images.select_classes(known)
    unseen_images = other if other is not None else (images.select_classes(new) if new else None)
    told = _Told(progress, 2 * len(seen_images) + 4 * (len(unseen_images) if unseen_images else 0))
    seen = _compare(method, seen_images, mode, told)
    if unseen_images is None or len(unseen_images) == 0:
        why = "The data has no class that was not trained on, and no other images were given."
        return RunFacts(method, mode, seen, None, why)
    if not method.open_classes:
        why = f"{method.title} learns its classes themselves: it cannot name others."
        return RunFacts(method, mode, seen, None, why)
    return RunFacts(method, mode, seen, _unseen(method, unseen_images, mode, told))


class _Told:
    """Adds up the progress of several evaluations."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.before = progress, total, 0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if self.progress is not None:
            self.progress(stage, min(self.before + done, self.total), self.total)
        if done == total:
            self.before += done


def _compare(method: Method, images: ImageSet, mode: str, told: _Told) -> Compared:
    adapted = evaluate(method, images, progress=told)
    same = tuple(adapted.classes) == method.classes
    words = method.prompts.given if same else None  # ids that were given stand for the method's own classes
    template = method.template if same else images.template
    frozen = ZeroShot(method.clip, adapted.classes, template=template, ids=words)
    return Compared(images, adapted, evaluate(frozen, images, progress=told), mode)


def _unseen(method: Method, images: ImageSet, mode: str, told: _Told) -> Unseen:
    alone = _compare(method.with_classes(images.classes, images.template), images, mode, told)
    clash = set(method.classes) & set(images.classes)
    if clash:
        return Unseen(alone, None, 0)
    every = method.with_classes([*method.classes, *images.classes], method.template)
    return Unseen(alone, _compare(every, images, mode, told), len(method.classes))
