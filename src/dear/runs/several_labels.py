"""Metrics for several labels per image: average precision per class, F1, exact sets."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dear.runs.evaluation import Evaluation, calibration_error

if TYPE_CHECKING:
    import pandas as pd

DRAWS = 200  #: of images with replacement, for intervals
_LEVEL = (0.05, 0.95)


@dataclass(frozen=True, repr=False)
class SeveralLabelsEvaluation(Evaluation):
    """The predictions of a model with several labels per image on a set.

    `labels` are bool [n, C]; `answers` the answered sets, bool [n, C], and `confidence` probabilities [n, C],
    by mode. Without a calibration there are no sets, and both are scores that rank images.
    """

    calibrated: bool = True

    @property
    def accuracy(self) -> dict[str, float]:
        """Share of images whose set is answered exactly, as in scikit-learn; NaN without a calibration."""
        if not self.calibrated:
            return dict.fromkeys(self.answers, float("nan"))
        return {
            mode: float((a == self.labels).all(dim=1).double().mean()) for mode, a in self.answers.items()
        }

    @property
    def per_class(self) -> dict[str, dict[str, float]]:
        """Average precision of each class that some images have and others do not, by mode."""
        result = {}
        for mode, scores in self.confidence.items():
            values = average_precision(scores, self.labels)
            by_class = zip(self.classes, values.tolist(), strict=True)
            result[mode] = {name: value for name, value in by_class if value == value}  # noqa: PLR0124 - NaN
        return result

    @property
    def mean_precision(self) -> dict[str, float]:
        """Mean average precision (mAP) over classes, by mode."""
        return {mode: sum(values.values()) / max(1, len(values)) for mode, values in self.per_class.items()}

    def f1(self, mode: str | None = None) -> dict[str, float]:
        """F1 of all labels together (micro) and as the mean over classes that occur (macro)."""
        answers, truth = self.answers[self.pick(mode)].double(), self.labels.double()
        hits, size = (answers * truth).sum(dim=0), answers.sum(dim=0) + truth.sum(dim=0)
        present = truth.sum(dim=0) > 0
        per_class_f1 = 2 * hits / size.clamp(min=1)
        return {
            "micro_f1": float(2 * hits.sum() / size.sum().clamp(min=1)),
            "macro_f1": float(per_class_f1[present].mean()),
        }

    def calibration_errors(self, mode: str | None = None) -> dict[str, float | None]:
        """Expected calibration error over all pairs of image and class; None without a calibration."""
        if not self.calibrated:
            return {"ece": None, "ece_trained": None, "ece_new": None}
        p = self.confidence[self.pick(mode)].flatten()  # [n, C] -> [n C]
        correct = (p >= 0.5) == self.labels.flatten()
        return {
            "ece": calibration_error(torch.maximum(p, 1 - p), correct),
            "ece_trained": None,
            "ece_new": None,
        }

    def intervals(self, mode: str | None = None) -> dict[str, tuple[float, float]]:
        """90% intervals of the mAP ("") and of each class's average precision, over draws of images."""
        scores, truth = self.confidence[self.pick(mode)], self.labels
        n = len(truth)
        generator = torch.Generator().manual_seed(0)
        weights = torch.stack(
            [torch.bincount(torch.randint(n, (n,), generator=generator), minlength=n) for _ in range(DRAWS)]
        ).double()
        values = torch.stack(
            [weighted_precision(scores[:, c], truth[:, c], weights) for c in range(len(self.classes))], dim=1
        )  # [DRAWS, C]
        levels = torch.tensor(_LEVEL, dtype=torch.float64)
        bounds = {"": values.nanmean(dim=1).quantile(levels).tolist()}
        for column, name in enumerate(self.classes):
            if not bool(values[:, column].isnan().all()):
                bounds[name] = values[:, column].nanquantile(levels).tolist()
        return {name: (low, high) for name, (low, high) in bounds.items()}

    def to_dict(self, mode: str | None = None) -> dict[str, Any]:
        """Plain values for JSON: mAP, F1, average precision per class with intervals, exact sets."""
        mode = self.pick(mode)
        bounds = self.intervals(mode)
        figures: dict[str, Any] = {
            "mode": mode,
            "task": "several labels",
            "map": self.mean_precision[mode],
            "map_interval": list(bounds[""]),
        }
        if self.calibrated:
            figures |= {**self.f1(mode), "accuracy": self.accuracy[mode]}
        return {
            **figures,
            "per_class": self.per_class[mode],
            "intervals": {name: list(pair) for name, pair in bounds.items() if name},
            "images": len(self.labels),
            "modes": self.mean_precision,
            **self.calibration_errors(mode),
            **({"removed": self.removed} if self.removed else {}),
        }

    def to_frame(self) -> pd.DataFrame:
        """Average precision and number of images per class, a pandas table with one column per mode."""
        import pandas as pd

        frame = pd.DataFrame(self.per_class)
        counts = dict(zip(self.classes, self.labels.sum(dim=0).tolist(), strict=True))
        frame.insert(0, "images", {name: counts[name] for name in frame.index})
        return frame.rename_axis("class")

    def __repr__(self) -> str:
        figures = ", ".join(f"{mode} {value:.1%}" for mode, value in self.mean_precision.items())
        count = f"{len(self.labels)} images of {len(self.classes)} classes"
        return f"<SeveralLabelsEvaluation: {count}, mean average precision {figures}>"

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(self.title)}</b></p>{self.to_frame().to_html(float_format='{:.3f}'.format)}"


def average_precision(scores: Tensor, targets: Tensor) -> Tensor:
    """Average precision [C] of scores [n, C] for bool [n, C]; NaN for a class of all images or of none.

    As scikit-learn's `average_precision_score`: images with equal scores count together.

    >>> average_precision(torch.tensor([[0.9], [0.8], [0.1]]), torch.tensor([[1], [0], [1]]).bool())
    tensor([0.8333], dtype=torch.float64)
    """
    equal_weights = torch.ones(1, len(scores), dtype=torch.float64)
    columns = range(scores.shape[1])
    return torch.cat([weighted_precision(scores[:, c], targets[:, c], equal_weights) for c in columns])


def weighted_precision(scores: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
    """Average precision [D] of scores [n] for bool [n], with image weights [D, n] per draw."""
    order = scores.argsort(descending=True)
    hits = (weights * truth)[:, order].cumsum(dim=1)  # [D, n]
    count = weights[:, order].cumsum(dim=1)
    ordered = scores[order]
    last = torch.ones(len(order), dtype=torch.bool)  # of images with one score
    last[:-1] = ordered[:-1] != ordered[1:]
    hits, count = hits[:, last], count[:, last]
    gained = torch.diff(hits, prepend=hits.new_zeros(len(hits), 1))
    value = (gained * hits / count.clamp(min=1e-12)).sum(dim=1) / hits[:, -1]
    varied = (hits[:, -1] > 0) & (hits[:, -1] < count[:, -1])
    return torch.where(varied, value, torch.nan)
