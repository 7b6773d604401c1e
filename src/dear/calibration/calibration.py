"""How logits become calibrated probabilities, and when an image is rejected as none of the classes.

Logits z of a mode become (method page, section 6)

    trained class c:   z_c / T
    new class c:       (z_c - m) / T_new + m / T

where m is the mean of all logits of the image: this common part depends on the image, not on its class, so
the two sets must not scale it differently. Next to trained classes, new ones are scaled as
those are: another scale would favor or penalize them as a whole, which lowers joint accuracy
(docs/answers.md).

Whether an image shows one of the classes is measured by two scores in standard deviations of held-out images:
a of its largest calibrated logit, b of its mean cosine with the nearest training images
(`dear.calibration.reference`). The score is `a - max(0, -b)²`: the logit detects classes that resemble the
trained ones, and an image that is farther from the training images than usual loses, the more the farther. In
a list with classes that were not trained only the logit counts: images of those need not be like the training
images. The threshold for "none of these" is read from the scores of held-out images.

`dear.train.calibrate` fits the temperatures by cross-validation. This module holds the values and applies
them; it knows no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from dear.calibration.rank import threshold_rank
from dear.utils.schema import Strict, Whole

_ENDS = ((1 - 0.95) / 2, (1 + 0.95) / 2)  # quantiles of a 95% interval

Positive = Annotated[float, Meta(gt=0, le=1e6)]
Finite = Annotated[float, Meta(ge=-1e9, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]


class ModeCalibration(Strict, frozen=True):
    """Temperatures and scores of one mode, from cross-validation."""

    temperature: Positive  #: logits of trained classes are divided by it
    #: the same for classes that were never trained, in a list of such classes alone
    new_temperature: Positive = 1.0
    #: the largest calibrated logit of each held-out image of a trained class
    logits: tuple[Finite, ...] = ()
    #: how often an image of a trained class scores above one of a left-out class; None: not measured
    auroc: Share | None = None
    #: expected calibration error of the held-out images under CLIP's temperature
    ece_before: Share | None = None
    ece_after: Share | None = None  #: the same with `temperature`
    #: with several labels, by trained class: added to the scaled logit, whose sigmoid is a probability
    biases: tuple[Finite, ...] = ()
    thresholds: tuple[Share, ...] = ()  #: the probability from which an image has the label


class Calibration(Strict, frozen=True):
    """The calibration of a run; `calibration.json` of a run folder."""

    format: Literal["dear calibration"] = "dear calibration"
    schema: Literal[1] = 1
    images: Whole = 0  #: held-out images that it was fitted on
    folds: Whole = 0  #: parts of the training images that were held out in turn
    class_folds: Whole = 0  #: parts of the classes that were left out in turn; 0: too few classes
    #: of the same held-out images, in the same order: mean cosine with the nearest other training images
    nearness: tuple[Finite, ...] = ()
    modes: dict[str, ModeCalibration] = {}  # noqa: RUF012 - msgspec copies it

    def __post_init__(self) -> None:
        for mode, fitted in self.modes.items():
            if self.nearness and len(fitted.logits) != len(self.nearness):
                raise ValueError(f"{mode}: {len(fitted.logits)} logits for {len(self.nearness)} images")

    def score(self, mode: str, largest: Tensor, nearness: Tensor | None = None) -> Tensor:
        """The score [b] that a threshold for "none of these" is compared with, in a mode.

        `largest` is the largest calibrated logit of each image [b], `nearness` its mean cosine with the
        nearest training images [b]; None: it does not count.
        """
        return combine_scores(
            standardize(largest, self.modes[mode].logits),
            None if nearness is None else standardize(nearness, self.nearness),
        )

    def held_out(self, mode: str, nearness: bool = True) -> list[float]:
        """The score of each held-out image; without `nearness` by its logit alone."""
        largest = torch.tensor(self.modes[mode].logits, dtype=torch.float64)
        near = torch.tensor(self.nearness, dtype=torch.float64) if nearness else None
        scores: list[float] = self.score(mode, largest, near).tolist()
        return scores


class Threshold(Strict, frozen=True):
    """The score below which an image is answered with "none of these"."""

    value: float  #: the score
    share: float  #: the requested share of images of trained classes that may be rejected
    low: float  #: lower end of the interval of the true share, at 95% confidence
    high: float  #: its upper end
    images: int  #: held-out images that the threshold was read from

    def among(self, images: int) -> tuple[float, float]:
        """The interval of the share that is refused of `images` further images of trained classes.

        It is wider than that of the true share, because a finite number of images adds its own error.
        """
        from scipy.stats import betabinom

        k = threshold_rank(self.share, self.images)
        ends = betabinom.ppf(_ENDS, images, k, self.images + 1 - k)
        return float(ends[0] / images), float(ends[1] / images)


def threshold(scores: Sequence[float], share: float = 0.05) -> Threshold:
    """The threshold that refuses at most a share of the images of known classes.

    With the k-th smallest of n scores as the threshold, the true share of refused images has a Beta(k,
    n + 1 - k) distribution if new images score as the held-out ones did; k is the largest number with mean
    k / (n + 1) <= share, but at least 1. The interval holds the middle 95% of that distribution. Held-out
    images were scored by methods that learned from fewer images: over many draws of training images 94 to 95%
    of the shares lie in it and 1.6% above it (docs/answers.md).

    >>> limit = threshold([0.1, 0.4, 0.5, 0.6] * 25)
    >>> limit.value, limit.images, round(limit.low, 3), round(limit.high, 3)
    (0.1, 100, 0.016, 0.099)
    """
    from scipy.stats import beta

    ordered = sorted(scores)
    n = len(ordered)
    k = threshold_rank(share, n)
    low, high = (float(beta.ppf(q, k, n + 1 - k)) for q in _ENDS)
    return Threshold(value=ordered[k - 1], share=share, low=low, high=high, images=n)


def standardize(values: Tensor, sample: Sequence[float] | Tensor) -> Tensor:
    """Values [b] in standard deviations of a sample, from its mean.

    >>> standardize(torch.tensor([3.0]), [0.0, 2.0])
    tensor([2.])
    """
    known = torch.as_tensor(sample, dtype=torch.float64)
    spread = known.std(correction=0).clamp(min=1e-6)
    return (values - known.mean().to(values)) / spread.to(values)


def combine_scores(logit: Tensor, nearness: Tensor | None) -> Tensor:
    """The score [b] of standard scores [b] of the largest logit and of the nearness to training images.

    >>> combine_scores(torch.tensor([1.0, 1.0]), torch.tensor([5.0, -2.0]))
    tensor([ 1., -3.])
    """
    return logit if nearness is None else logit - (-nearness).clamp(min=0).square()


def class_scales(fitted: ModeCalibration, trained: Sequence[bool]) -> Tensor:
    """For `apply_scales`: factors of the logit and of the mean logit of each class, [2, C].

    The new temperature counts in lists of new classes alone.
    """
    usual = torch.full((len(trained),), 1 / fitted.temperature)
    if any(trained):
        return torch.stack([usual, torch.zeros_like(usual)])
    new = torch.full_like(usual, 1 / fitted.new_temperature)
    return torch.stack([new, usual - new])


def apply_scales(logits: Tensor, scales: Tensor) -> Tensor:
    """Logits [B, C] on the common scale of `class_scales` [2, C], or of `several_labels_scales` [3, C]."""
    scaled = logits * scales[0] + logits.mean(dim=-1, keepdim=True) * scales[1]
    return scaled if len(scales) == 2 else scaled + scales[2]


def several_labels_scales(fitted: ModeCalibration, trained_indices: Sequence[int | None]) -> Tensor:
    """The same for several labels, [3, C]: factors of the logit and of the mean logit (0), and what is added.

    `trained_indices` [C] are those of the classes among the trained ones; a new class (None) has their mean.
    """
    biases = torch.tensor([*fitted.biases, sum(fitted.biases) / len(fitted.biases)])
    added = biases[[len(fitted.biases) if index is None else index for index in trained_indices]]
    return torch.stack([torch.full_like(added, 1 / fitted.temperature), torch.zeros_like(added), added])
