"""Accuracy of a probe with the present labels, and the gain expected from fifty more.

A cross-validation answers every labeled image by probes that were fitted to a quarter, a half and all of the
remaining labels. The errors at these three sizes follow a power law `error = c · labels^-b` closely enough
to be extended by a few dozen labels. Which images are labeled is chance, so that accuracy with more labels
differs from the curve by about `DRAW_ERROR`; the interval of the gain adds that to the bootstrap over the
held-out images, which alone covered a third of the gains that were then measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dear.errors import InputError
from dear.unlabeled.pool import MAX_COMPARED, label_folds, labeled_groups
from dear.unlabeled.probe import UNLABELED, draw_rows, fit_semi_supervised_probe

SHARES = (0.25, 0.5, 1.0)  #: of the remaining labels that the probes are fitted to
MIN_HELD_OUT = 20  #: images below which no gain is forecast
DRAW_ERROR = 0.04  #: standard deviation of measured gains around forecasts
Z_90 = 1.645  #: standard errors on each side of a 90 % interval
_BOOTSTRAPS = 500


@dataclass(frozen=True)
class LearningCurve:
    """Whether each held-out image is answered correctly by probes fitted to few and many labels."""

    sizes: tuple[float, ...]  #: mean number of labels that the probes were fitted to
    correct: Tensor  #: bool [sizes, images held out]


@dataclass(frozen=True)
class Forecast:
    """Accuracies are fractions of 1; each interval covers 90 %."""

    images: int  #: that were held out
    accuracy: float  #: on held-out images, with nearly all labels
    accuracy_interval: tuple[float, float]
    gain: float | None  #: expected from more labels; None: too few labels to estimate it
    gain_interval: tuple[float, float] | None


def learning_curve(
    features: Tensor,
    labels: Tensor,
    texts: Tensor,
    *,
    units: Tensor | None = None,
) -> LearningCurve:
    """Cross-validated answers at several numbers of labels.

    Args:
        features: unit features of all images [n, E].
        labels: int64 [n], -1 where there is none.
        texts: unit text features times CLIP's scale, [C, E].
        units: [n], copies of an image have the same: they are held out together, also those without a label.
    """
    labeled = labels != UNLABELED
    fold = label_folds(labels, labeled_groups(features, labels, units))
    pool = draw_rows((~labeled).nonzero()[:, 0], MAX_COMPARED)
    numbers = fold[fold >= 0].unique().tolist()
    generator = torch.Generator().manual_seed(0)
    sizes = np.zeros(len(SHARES))
    correct: list[list[Tensor]] = [[] for _ in SHARES]
    for number in numbers:
        test = (fold == number).nonzero()[:, 0]
        train = (labeled & (fold != number)).nonzero()[:, 0]
        order = train[torch.randperm(len(train), generator=generator).to(train.device)]
        unlabeled = pool if units is None else pool[~torch.isin(units[pool], units[test])]
        for index, share in enumerate(SHARES):
            drawn = order[: max(1, round(share * len(order)))]
            rows = torch.cat([drawn, unlabeled])
            fit = fit_semi_supervised_probe(features[rows], labels[rows], texts)
            correct[index].append(fit.probe.logits(features[test]).argmax(dim=1) == labels[test])
            sizes[index] += len(drawn) / len(numbers)
    if not numbers:
        return LearningCurve(tuple(sizes), torch.zeros(len(SHARES), 0, dtype=torch.bool))
    return LearningCurve(tuple(sizes), torch.stack([torch.cat(parts) for parts in correct]).cpu())


def forecast_gain(curve: LearningCurve, labels: int, more: int = 50) -> Forecast:
    """The cross-validated accuracy with its interval, and the gain expected from more labels.

    Args:
        curve: from `learning_curve`.
        labels: that there are now.
        more: labels to be added.

    Raises:
        InputError: labels or more is below 1.

    Example:
        >>> steps = torch.arange(100) < torch.tensor([[50], [65], [75]])
        >>> forecast = forecast_gain(LearningCurve((25.0, 50.0, 100.0), steps), labels=100, more=100)
        >>> round(forecast.accuracy, 2), round(forecast.gain, 2)
        (0.75, 0.07)
    """
    if labels < 1 or more < 1:
        raise InputError(f"labels and more must be at least 1, got {labels} and {more}")
    correct: NDArray[np.bool_] = curve.correct.numpy()
    images = correct.shape[1]
    if not images:
        return Forecast(0, math.nan, (0.0, 1.0), None, None)
    accuracy = float(correct[-1].mean())
    interval = wilson_interval(int(correct[-1].sum()), images)
    if images < MIN_HELD_OUT:
        return Forecast(images, accuracy, interval, None, None)
    sizes = np.asarray(curve.sizes)
    gain = _gain(sizes, correct.mean(axis=1), labels, more)
    generator = np.random.default_rng(0)
    draws = [correct[:, generator.integers(images, size=images)].mean(axis=1) for _ in range(_BOOTSTRAPS)]
    spread = float(np.std([_gain(sizes, draw, labels, more) for draw in draws]))
    half = Z_90 * math.hypot(spread, DRAW_ERROR)
    return Forecast(images, accuracy, interval, gain, (gain - half, gain + half))


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """The 90 % interval of a share, by Wilson's score.

    >>> [round(end, 3) for end in wilson_interval(8, 10)]
    [0.541, 0.931]
    """
    if count == 0:
        return 0.0, 1.0
    share, extra = successes / count, Z_90 * Z_90 / count
    center = (share + extra / 2) / (1 + extra)
    half = Z_90 * math.sqrt(share * (1 - share) / count + extra / (4 * count)) / (1 + extra)
    return max(0.0, center - half), min(1.0, center + half)


def _gain(sizes: NDArray[np.float64], accuracies: NDArray[np.float64], labels: int, more: int) -> float:
    """The gain that the power law through the errors predicts for `more` labels; at least 0."""
    errors = np.maximum(1 - accuracies, 1e-3)
    slope, _ = np.polyfit(np.log(sizes), np.log(errors), 1)
    slope = min(0.0, max(-1.0, float(slope)))
    error = float(errors[-1]) * (labels / float(sizes[-1])) ** slope
    return float(error - error * ((labels + more) / labels) ** slope)
