"""Accuracy of a method on a labeled set, overall and per class, in every mode at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dear.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from dear.runs.tree import TreeFigures

BINS = 15  #: of the calibration error


@dataclass(frozen=True)
class Rejection:
    """How well a run separates images of its classes from images of no class."""

    auroc: float  #: probability that an image of a known class scores above one of no class
    refused: float  #: share of images of known classes that are answered with "none of these"
    refused_low: float  #: 95% confidence interval of the share that is expected of as many images
    refused_high: float  #: its upper end; the share is often below `refused_low`, too
    false_acceptance: float  #: share of images of no class that are answered with a class
    false_low: float  #: its 90% confidence interval
    false_high: float
    known: int  #: images of known classes
    unknown: int  #: images of no class
    share: float  #: the requested share of images of known classes that may be rejected

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def sentence(self) -> str:
        """The figures in words."""
        return (
            f"rejection: AUROC {self.auroc:.3f}; {self.refused:.1%} of {self.known} known images rejected "
            f"(promised: at most {self.refused_high:.1%}); {self.false_acceptance:.1%} of "
            f"{self.unknown} unknown images accepted ({self.false_low:.1%} to {self.false_high:.1%})"
        )


@dataclass(frozen=True)
class Evaluation:
    """The predictions of a method on a set."""

    classes: tuple[str, ...]  #: class names, in the order of the labels
    labels: Tensor  #: [n], the truth
    answers: dict[str, Tensor]  #: mode -> [n], the class answered
    #: mode -> [n], its probability: calibrated where the run is, else under CLIP's temperature
    confidence: dict[str, Tensor]
    unreadable: tuple[str, ...] = ()  #: why images were left out, one sentence each
    #: class and value of each image, if the set has values in addition to the class
    groups: tuple[str, ...] | None = None
    trained: tuple[bool, ...] = ()  #: whether each class was trained; empty: not distinguished
    scores: dict[str, Tensor] | None = None  #: mode -> [n], compared with thresholds; None: no calibration
    tree: dict[str, TreeFigures] | None = None  #: by mode, of a run with a tree of classes
    mode: str | None = None  #: the mode of `report`; None: the method's usual one
    title: str = ""  #: model and data, in words
    removed: str = ""  #: what was removed from the backbone, in words
    rejection: Rejection | None = None  #: of images of no class, if there are any

    @property
    def accuracy(self) -> dict[str, float]:
        """Share of images answered correctly, by mode."""
        return {mode: float((a == self.labels).double().mean()) for mode, a in self.answers.items()}

    @property
    def per_class(self) -> dict[str, dict[str, float]]:
        """Share of images answered correctly, by mode and class; classes without images are left out."""
        result: dict[str, dict[str, float]] = {}
        for mode, answers in self.answers.items():
            correct = (answers == self.labels).double()
            total = torch.bincount(self.labels, minlength=len(self.classes))
            hits = torch.bincount(self.labels, weights=correct, minlength=len(self.classes))
            result[mode] = {
                name: float(hits[i] / total[i]) for i, name in enumerate(self.classes) if total[i] > 0
            }
        return result

    def calibration_errors(self, mode: str | None = None) -> dict[str, float | None]:
        """Expected calibration error (15 bins) of all images, of trained and of new classes; None: none."""
        mode = self.pick(mode)
        correct = self.answers[mode] == self.labels
        all_images, none = torch.ones_like(correct), torch.zeros_like(correct)
        known = torch.tensor(self.trained)[self.labels] if self.trained else none
        parts = {"ece": all_images, "ece_trained": known, "ece_new": ~known if self.trained else none}
        return {
            name: calibration_error(self.confidence[mode][part], correct[part]) if bool(part.any()) else None
            for name, part in parts.items()
        }

    def per_group(self, mode: str | None = None) -> dict[str, float]:
        """Share of images answered correctly, by group of class and value; empty without groups."""
        if self.groups is None:
            return {}
        correct = (self.answers[self.pick(mode)] == self.labels).tolist()
        hits_of: dict[str, list[bool]] = {}
        for group, hit in zip(self.groups, correct, strict=True):
            hits_of.setdefault(group, []).append(hit)
        return {group: sum(hits) / len(hits) for group, hits in hits_of.items()}

    def pick(self, mode: str | None) -> str:
        """`mode`, checked; None returns the evaluation's mode, or the method's default."""
        mode = mode or self.mode or next(iter(self.answers))
        if mode not in self.answers:
            raise UsageError(f"mode must be one of {', '.join(self.answers)}, got {mode!r}")
        return mode

    def to_dict(self, mode: str | None = None) -> dict[str, Any]:
        """Plain values for JSON: accuracy and per_class of one mode, and the accuracies of all."""
        mode = self.pick(mode)
        groups = self.per_group(mode)
        worst = {}
        if groups:
            name = min(groups, key=groups.__getitem__)
            worst = {"worst_group": {"group": name, "accuracy": groups[name], "groups": len(groups)}}
        return {
            "mode": mode,
            "accuracy": self.accuracy[mode],
            "per_class": self.per_class[mode],
            "images": len(self.labels),
            "modes": self.accuracy,
            **self.calibration_errors(mode),
            **worst,
            **({} if self.tree is None else {"tree": self.tree[mode].to_dict()}),
            **({"removed": self.removed} if self.removed else {}),
            **({} if self.rejection is None else {"unknown": self.rejection.to_dict()}),
        }

    def to_frame(self) -> pd.DataFrame:
        """Accuracy and number of images per class, a pandas table with one column per mode."""
        import pandas as pd

        counts = torch.bincount(self.labels, minlength=len(self.classes)).tolist()
        frame = pd.DataFrame(self.per_class)
        frame.insert(0, "images", {name: n for name, n in zip(self.classes, counts, strict=True) if n})
        return frame.rename_axis("class")

    def __repr__(self) -> str:
        accuracies = ", ".join(f"{mode} {value:.1%}" for mode, value in self.accuracy.items())
        return f"<Evaluation: {len(self.labels)} images of {len(self.classes)} classes, {accuracies}>"

    def _repr_html_(self) -> str:
        values = self.to_dict()
        facts = [f"accuracy {value:.1%} (mode {name})" for name, value in values["modes"].items()]
        facts += [f"{values['images']} images", f"calibration error {values['ece']:.1%}"]
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{value:.1%}</td></tr>"
            for name, value in values["per_class"].items()
        )
        head = f"<p><b>{escape(self.title)}</b><br>{'; '.join(facts)}</p>"
        return f"{head}<table><tr><th>class</th><th>accuracy</th></tr>{rows}</table>"


def calibration_error(confidence: Tensor, correct: Tensor) -> float:
    """Expected calibration error: |accuracy - confidence| of bins (a, b] of equal width, weighted by images.

    `confidence` [n] is the probability of each answer, `correct` [n] whether the answer is correct.

    >>> calibration_error(torch.tensor([0.9, 0.9, 0.5]), torch.tensor([True, False, True]))
    0.4333333...
    """
    confidences = confidence.double()
    bins = (confidences * BINS).ceil().clamp(1, BINS).long() - 1
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, correct.double() - confidences)
    return float(gaps.abs().sum() / len(confidences))


def share_interval(hits: int, n: int, level: float = 0.9) -> tuple[float, float]:
    """Clopper and Pearson's confidence interval of a share, from `hits` of `n`.

    >>> tuple(round(end, 3) for end in share_interval(0, 10))
    (0.0, 0.259)
    """
    from scipy.stats import binomtest

    interval = binomtest(hits, n).proportion_ci(level, "exact")
    return float(interval.low), float(interval.high)
