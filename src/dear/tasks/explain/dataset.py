"""Which parts carry the answers for a labeled set, and which images are answered for an unusual reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.data.batches import over_batches, pixels_for
from dear.data.images import ImageSet, targets_of
from dear.errors import DataError, UsageError
from dear.tasks.explain.explainer import Explainer
from dear.tasks.explain.scores import BATCH
from dear.utils.files import PathLike, write_atomic
from dear.utils.progress import Progress

if TYPE_CHECKING:
    import pandas as pd

    from dear.runs.model import Model


UNUSUAL = 12  #: images answered for an unusual reason, at most
MISSED = -1  #: the answer for a label that is not answered


@dataclass(frozen=True)
class SetExplanation:
    """Which parts carry the answers for a labeled set.

    With several labels per image, a row is an image and one of its labels, and the answer is that label where
    it is answered, else `MISSED`.

    Renders as a page in notebooks. `to_frame` is the table of parts per image, `write_page` the page.
    """

    images: ImageSet  #: those that could be read
    classes: tuple[str, ...]  #: of the model
    parts: tuple[str, ...]  #: names of the parts
    labels: Tensor  #: [n]
    answers: Tensor  #: [n]
    values: Tensor  #: [n, parts], of the answer's score above the mean of all classes
    method: str  #: title of the method
    notes: Mapping[str, str]  #: how the explanation was made
    unusual: tuple[int, ...] = ()  #: images answered for an unusual reason, the oddest first
    distances: tuple[float, ...] = ()  #: how unusual they are
    notices: tuple[str, ...] = ()

    def mixture(self, label: int, right: bool) -> Tensor | None:
        """Mean parts of the right (or wrong) answers for images of a class, [parts]; None: there are none."""
        chosen = (self.labels == label) & ((self.answers == self.labels) == right)
        return self.values[chosen].mean(0) if bool(chosen.any()) else None

    def mixtures(self) -> list[tuple[str, bool, int, Tensor]]:
        """(class, answered right, number of images, mean parts [parts]) of every group with images."""
        right = self.answers == self.labels
        rows = []
        for label, name in enumerate(self.classes):
            for value in (True, False):
                mixture = self.mixture(label, value)
                if mixture is not None:
                    rows.append(
                        (name, value, int(((self.labels == label) & (right == value)).sum()), mixture)
                    )
        return rows

    def answer(self, place: int) -> str:
        """The answer of a row in words."""
        answer = int(self.answers[place])
        return "missed" if answer == MISSED else self.classes[answer]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows: dict[str, dict[str, dict[str, float]]] = {}
        for name, right, _, mixture in self.mixtures():
            values = {part: round(float(v), 4) for part, v in zip(self.parts, mixture, strict=True)}
            rows.setdefault(name, {})["right" if right else "wrong"] = values
        return {
            "images": len(self.labels),
            "accuracy": round(float((self.answers == self.labels).float().mean()), 6),
            "classes": rows,
            "unusual": [
                {
                    "image": self.images.key(place),
                    "answer": self.answer(place),
                    "class": self.classes[int(self.labels[place])],
                    "distance": round(distance, 3),
                }
                for place, distance in zip(self.unusual, self.distances, strict=True)
            ],
            "notices": list(self.notices),
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per image: class, answer, and the parts of the answer's score. Needs pandas."""
        import pandas as pd

        rows = zip(self.labels.tolist(), self.values.tolist(), strict=True)
        return pd.DataFrame(
            {"image": self.images.key(place), "class": self.classes[label], "answer": self.answer(place)}
            | dict(zip(self.parts, values, strict=True))
            for place, (label, values) in enumerate(rows)
        )

    def _repr_html_(self) -> str:
        from dear.report.page import iframe  # plotly, which a service does not need
        from dear.tasks.explain.page import set_page

        return iframe(set_page(self))

    def write_page(self, path: PathLike) -> None:
        """Write the page to a file, whole or not at all."""
        from dear.tasks.explain.page import set_page

        write_atomic(path, set_page(self))


def explain_set(explainer: Explainer, images: ImageSet, progress: Progress | None = None) -> SetExplanation:
    """Decompose the answers for a labeled set, and find those with an unusual mixture of parts.

    The mixture of an image is compared with those of all images with the same answer: how far each part is
    from their mean, in their standard deviations, and the root of the mean square of that. Unreadable images
    are skipped.

    Raises:
        UsageError: the set has classes that the model does not have.
        DataError: no image can be read.
    """
    images, labels = _labels_among(explainer.model, images)
    notices: list[str] = []

    def run(some: ImageSet, rows: list[int]) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        trace = explainer.scores.trace(pixels_for(explainer.method.clip, some, rows))
        notices[:] = explainer.notices(trace)
        if explainer.scores.several:
            classes = labels[rows][:, None]
            above = trace.logits.cpu().gather(1, classes)[:, 0] >= explainer.scores.limits[classes[:, 0]]
            answers = torch.where(above, classes[:, 0], MISSED)
        else:
            classes = explainer.scores.pairs(trace.logits.cpu())[:, :1]
            answers = classes[:, 0]
        table = explainer.scores.relative_table(trace.parts(explainer.scores.questions(classes)), classes)
        return answers, torch.stack([value[0] for value in table.values()], dim=-1), tuple(table)

    parts, problems = over_batches(
        images, run, explainer.method.clip, unreadable="skip", progress=progress, batch=BATCH
    )
    keep = [row for row in range(len(images)) if row not in problems]
    if not keep:
        raise DataError(f"{images.name}: no image can be read")
    answers = torch.cat([part[0] for part in parts])[keep]
    values = torch.cat([part[1] for part in parts])[keep]
    distances = torch.zeros(len(keep), dtype=torch.float64)
    kept_labels = labels.cpu()[keep]
    groups = kept_labels if explainer.scores.several else answers
    for group in groups.unique().tolist():
        same = groups == group
        if int(same.sum()) > 2:
            spread = values[same].std(0).clamp(min=1e-9)
            distances[same] = ((values[same] - values[same].mean(0)) / spread).square().mean(-1).sqrt()
    order = distances.argsort(descending=True, stable=True)[:UNUSUAL].tolist()
    return SetExplanation(
        images if len(keep) == len(images) else images.subset(keep),
        explainer.model.classes,
        parts[0][2],
        kept_labels,
        answers,
        values,
        explainer.method.title,
        explainer.notes(),
        tuple(order),
        tuple(float(distances[place]) for place in order),
        tuple(dict.fromkeys(notices)),
    )


def _labels_among(model: Model, images: ImageSet) -> tuple[ImageSet, Tensor]:
    """The images and their labels [n] among the classes of a model; of several labels, one image per label.

    Raises:
        UsageError: the set has classes that the model does not have.
    """
    numbers = {name: number for number, name in enumerate(model.classes)}
    unknown = next((name for name in images.classes if name not in numbers), None)
    if unknown is not None:
        raise UsageError(
            f"{images.name}: classes must be those of the model ({', '.join(model.classes[:8])}), got "
            f"{unknown!r}; explain images of these classes"
        )
    if not model.method.several:
        return images, model.for_labels(images)[1]
    targets = targets_of(images)
    if targets is None:
        targets = F.one_hot(images.labels, len(images.classes)).bool()
    rows, columns = targets.cpu().nonzero().unbind(1)
    of_model = torch.tensor([numbers[name] for name in images.classes])
    return images.subset(rows.tolist()), of_model[columns]
