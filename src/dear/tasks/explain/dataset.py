"""Which parts carry the answers for a labeled set, and which images are answered for an unusual reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dear.data.batches import over_batches, pixels_for
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.tasks.explain.explainer import BATCH, Explainer
from dear.utils.progress import Progress


@dataclass(frozen=True)
class SetExplanation:
    """Which parts carry the answers for a labeled set."""

    name: str
    classes: tuple[str, ...]
    parts: tuple[str, ...]  #: names of the parts
    labels: Tensor  #: [n]
    answers: Tensor  #: [n]
    values: Tensor  #: [n, parts], of the answer's score above the mean of all classes
    images: tuple[str, ...]
    unusual: tuple[int, ...] = field(default=())  #: images answered for an unusual reason, the oddest first
    distances: tuple[float, ...] = field(default=())  #: how unusual they are
    notices: tuple[str, ...] = ()

    def mixture(self, label: int, right: bool) -> Tensor | None:
        """Mean parts of the right (or wrong) answers for images of a class, [parts]; None: there are none."""
        chosen = (self.labels == label) & ((self.answers == self.labels) == right)
        return self.values[chosen].mean(0) if bool(chosen.any()) else None

    def facts(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows: dict[str, dict[str, dict[str, float]]] = {}
        for label, name in enumerate(self.classes):
            for right in (True, False):
                mixture = self.mixture(label, right)
                if mixture is not None:
                    values = {part: round(float(v), 4) for part, v in zip(self.parts, mixture, strict=True)}
                    rows.setdefault(name, {})["right" if right else "wrong"] = values
        return {
            "images": len(self.labels),
            "accuracy": round(float((self.answers == self.labels).float().mean()), 6),
            "classes": rows,
            "unusual": [
                {
                    "image": self.images[place],
                    "answer": self.classes[int(self.answers[place])],
                    "class": self.classes[int(self.labels[place])],
                    "distance": round(distance, 3),
                }
                for place, distance in zip(self.unusual, self.distances, strict=True)
            ],
            "notices": list(self.notices),
        }


def explain_set(
    explainer: Explainer, images: ImageSet, progress: Progress | None = None, most: int = 12
) -> SetExplanation:
    """Take the answers for a labeled set apart, and find those with an unusual mixture of parts.

    The mixture of an image is compared with those of all images that got the same answer: how far each part
    lies from their mean, in their standard deviations, and the root of the mean square of that.
    """
    model = explainer.model
    known, labels = model.for_labels(images)
    if known is not model:
        raise UsageError(
            f"{images.name}: has classes that the model does not know; explain images of its own classes "
            f"({', '.join(model.classes[:8])})"
        )
    notices: list[str] = []

    def run(some: ImageSet, rows: list[int]) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        trace = explainer.trace(pixels_for(explainer.method.clip, some, rows))
        notices[:] = explainer.notices(trace)
        pairs = explainer.pairs(trace.logits.cpu())
        questions = explainer.questions(pairs)[:1]
        table = explainer.table(trace.parts(questions), questions)
        return pairs[:, 0], torch.stack([value[0] for value in table.values()], dim=-1), tuple(table)

    parts, problems = over_batches(
        images, run, explainer.method.clip, unreadable="skip", progress=progress, batch=BATCH
    )
    keep = [row for row in range(len(images)) if row not in problems]
    answers = torch.cat([part[0] for part in parts])[keep]
    values = torch.cat([part[1] for part in parts])[keep]
    distances = torch.zeros(len(keep), dtype=torch.float64)
    for answer in answers.unique().tolist():
        own = answers == answer
        if int(own.sum()) > 2:
            spread = values[own].std(0).clamp(min=1e-9)
            distances[own] = ((values[own] - values[own].mean(0)) / spread).square().mean(-1).sqrt()
    order = distances.argsort(descending=True, stable=True)[:most].tolist()
    return SetExplanation(
        images.name,
        model.classes,
        parts[0][2],
        labels.cpu()[keep],
        answers,
        values,
        tuple(images.key(row) for row in keep),
        tuple(order),
        tuple(float(distances[place]) for place in order),
        tuple(dict.fromkeys(notices)),
    )
