"""Logistic regression with an L2 penalty, fitted by L-BFGS; the penalty is chosen by cross-validation.

Labels [n] are fitted by a multinomial regression, rows [n, C] of several labels by one regression per class.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dear.data.folds import IntArray, feature_folds
from dear.data.images import main_labels
from dear.methods.tensors import indicators
from dear.utils.lbfgs import minimize_lbfgs

STRENGTHS = (10.0, 100.0, 1000.0)  #: candidates for C
DEFAULT_STRENGTH = 100.0  #: C if too few images can be held out
_FOLDS = 4
_MAX_STEPS = 1000
_GRADIENT_TOLERANCE = 1e-6
_TEMPERATURES = tuple(2.0**power for power in range(-3, 4))


def fit_logistic(
    features: Tensor,
    labels: Tensor,
    classes: int,
    strength: float,
    offset: Tensor | None = None,
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Weight [C, W] and bias [C] that minimize `strength · sum of cross-entropies + |weight|² / 2`.

    Features are [n, W], labels [n] or [n, C]; `offset` [n, C] is added to the logits; `start` is the initial
    weight and bias, by default 0.
    """
    shape, count, dtype = (classes, features.shape[1] + 1), len(features), features.dtype
    # In float32 the search stops far from the minimum, at a point that depends on the order of the images.
    features = features.double()
    initial = torch.zeros(shape) if start is None else torch.cat([start[0], start[1][:, None]], dim=1)
    truth, several = indicators(labels, classes).to(features), labels.ndim == 2

    def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
        weight = torch.from_numpy(point.reshape(shape)).to(features)  # [C (W + 1)] -> [C, W + 1]
        logits = F.linear(features, weight[:, :-1], weight[:, -1])
        logits = logits if offset is None else logits + offset
        if several:
            log_likelihood = -F.binary_cross_entropy_with_logits(logits, truth, reduction="sum")
            slope = (logits.sigmoid() - truth) / count
        else:
            log_probabilities = logits.log_softmax(dim=1)
            log_likelihood = (log_probabilities * truth).sum()
            slope = (log_probabilities.exp() - truth) / count  # [n, C], of the mean loss in the logits
        gradient = torch.cat([slope.T @ features, slope.sum(dim=0)[:, None]], dim=1)
        gradient[:, :-1] += weight[:, :-1] / (strength * count)
        total = weight[:, :-1].square().sum() / (2 * strength) - log_likelihood
        return float(total) / count, gradient.cpu().numpy().ravel()

    with torch.no_grad():
        point = initial.double().cpu().numpy().ravel()
        point = minimize_lbfgs(loss, point, maxiter=_MAX_STEPS, gtol=_GRADIENT_TOLERANCE, ftol=1e-12)
    weight = torch.from_numpy(point.reshape(shape)).to(features.device, dtype)  # [C, W + 1], the bias last
    return weight[:, :-1].contiguous(), weight[:, -1].contiguous()


def choose_strength(
    features: Tensor,
    labels: Tensor,
    classes: int,
    offset: Tensor | None = None,
    units: IntArray | None = None,
) -> float:
    """The C of `STRENGTHS` with the best held-out likelihood; `DEFAULT_STRENGTH` with too few images.

    Each candidate is evaluated at its best temperature, because calibration sets the temperature afterwards.
    The choice does not depend on the order of images or classes. `units` [n]: copies of an image have the
    same and are held out together; None: images with equal features are copies.
    """
    several = labels.ndim == 2
    fold = feature_folds(features, main_labels(labels.bool()) if several else labels, _FOLDS, units)
    if int((fold >= 0).sum()) < 2 * _FOLDS:
        return DEFAULT_STRENGTH
    held_out: dict[float, list[Tensor]] = {strength: [] for strength in STRENGTHS}
    truth = torch.cat([labels[fold == number] for number in range(_FOLDS)])
    for number in range(_FOLDS):
        test, train = fold == number, fold != number
        fitted, train_offset = None, None if offset is None else offset[train]
        for strength in STRENGTHS:  # strongest penalty first: each fit starts from the previous one
            fitted = fit_logistic(features[train], labels[train], classes, strength, train_offset, fitted)
            logits = F.linear(features[test], *fitted)
            held_out[strength].append(logits if offset is None else logits + offset[test])

    def loss(strength: float) -> float:
        logits = torch.cat(held_out[strength])
        cross_entropy = F.binary_cross_entropy_with_logits if several else F.cross_entropy
        return min(float(cross_entropy(logits / temperature, truth)) for temperature in _TEMPERATURES)

    return min(STRENGTHS, key=loss)
