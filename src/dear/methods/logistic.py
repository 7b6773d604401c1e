"""Logistic regression with an L2 penalty, fitted by L-BFGS; its strength by cross-validation.

Labels [n] are learned by a multinomial regression, rows [n, C] of several labels by one regression per class.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dear.data.folds import feature_folds
from dear.data.images import main_labels
from dear.methods.tensors import indicators

STRENGTHS = (10.0, 100.0, 1000.0)  #: C to choose from
USUAL = 100.0  #: C where too few images can be held out to choose
_FOLDS = 4
_STEPS = 1000
_PRECISE = 1e-6  # of the gradient
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

    Features are [n, W], labels [n] or [n, C]; `offset` [n, C] is added to the logits; the search
    starts at `start`, or 0.
    """
    from scipy.optimize import minimize

    shape, count, kind = (classes, features.shape[1] + 1), len(features), features.dtype
    # In float64: float32 stops the search far from the minimum, at a point that depends on the order of sums.
    features = features.double()
    initial = torch.zeros(shape) if start is None else torch.cat([start[0], start[1][:, None]], dim=1)
    truth, several = indicators(labels, classes).to(features), labels.ndim == 2

    def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
        weight = torch.from_numpy(point.reshape(shape)).to(features)  # [C, W + 1]
        logits = F.linear(features, weight[:, :-1], weight[:, -1])
        logits = logits if offset is None else logits + offset
        if several:
            fit = -F.binary_cross_entropy_with_logits(logits, truth, reduction="sum")
            slope = (logits.sigmoid() - truth) / count
        else:
            logs = logits.log_softmax(dim=1)
            fit = (logs * truth).sum()
            slope = (logs.exp() - truth) / count
        gradient = torch.cat([slope.T @ features, slope.sum(dim=0)[:, None]], dim=1)
        gradient[:, :-1] += weight[:, :-1] / (strength * count)
        total = weight[:, :-1].square().sum() / (2 * strength) - fit
        return float(total) / count, gradient.cpu().numpy().ravel()

    with torch.no_grad():
        tight = {"maxiter": _STEPS, "gtol": _PRECISE, "ftol": 1e-12}
        point = initial.double().cpu().numpy().ravel()
        result = minimize(loss, point, jac=True, method="L-BFGS-B", options=tight)
    weight = torch.from_numpy(result.x.reshape(shape)).to(features.device, kind)  # [C, W + 1], the bias last
    return weight[:, :-1].contiguous(), weight[:, -1].contiguous()


def choose_strength(features: Tensor, labels: Tensor, classes: int, offset: Tensor | None = None) -> float:
    """The C of `STRENGTHS` with the best likelihood of held-out images; `USUAL` where none can be held out.

    Each is judged at its best temperature, since calibration sets that. The choice does not depend on the
    order of images or classes.
    """
    several = labels.ndim == 2
    fold = feature_folds(features, main_labels(labels.bool()) if several else labels, _FOLDS)
    if int((fold >= 0).sum()) < 2 * _FOLDS:
        return USUAL
    held_out: dict[float, list[Tensor]] = {strength: [] for strength in STRENGTHS}
    truth = torch.cat([labels[fold == number] for number in range(_FOLDS)])
    for number in range(_FOLDS):
        held, used = fold == number, fold != number
        fitted, part = None, None if offset is None else offset[used]
        for strength in STRENGTHS:  # strongest penalty first: each fit starts at the previous one
            fitted = fit_logistic(features[used], labels[used], classes, strength, part, fitted)
            logits = F.linear(features[held], *fitted)
            held_out[strength].append(logits if offset is None else logits + offset[held])

    def loss(strength: float) -> float:
        logits = torch.cat(held_out[strength])
        each = F.binary_cross_entropy_with_logits if several else F.cross_entropy
        return min(float(each(logits / temperature, truth)) for temperature in _TEMPERATURES)

    return min(STRENGTHS, key=loss)
