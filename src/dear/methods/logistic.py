"""Multinomial logistic regression with an L2 penalty, fitted by L-BFGS; its strength by cross-validation."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dear.data.folds import feature_folds

STRENGTHS = (10.0, 100.0, 1000.0)  #: C to choose from
USUAL = 100.0  #: C where too few images can be held out to choose
_FOLDS = 4
_STEPS = 200
_PRECISE = 1e-5  # of the gradient
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

    Features are [n, W], labels [n]; `offset` [n, C] is added to the logits; the search begins at `start`, or
    0.
    """
    from scipy.optimize import minimize

    shape, count = (classes, features.shape[1] + 1), len(features)
    own = torch.zeros(shape) if start is None else torch.cat([start[0], start[1][:, None]], dim=1)
    truth = F.one_hot(labels, classes).to(features)

    def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
        weight = torch.from_numpy(point.reshape(shape)).to(features)
        logits = F.linear(features, weight[:, :-1], weight[:, -1])
        logs = (logits if offset is None else logits + offset).log_softmax(dim=1)
        slope = (logs.exp() - truth) / count
        gradient = torch.cat([slope.T @ features, slope.sum(dim=0)[:, None]], dim=1)
        gradient[:, :-1] += weight[:, :-1] / (strength * count)
        total = weight[:, :-1].square().sum() / (2 * strength) - (logs * truth).sum()
        return float(total) / count, gradient.double().cpu().numpy().ravel()

    with torch.no_grad():
        tight = {"maxiter": _STEPS, "gtol": _PRECISE, "ftol": 1e-8}
        found = minimize(loss, own.double().cpu().numpy().ravel(), jac=True, method="L-BFGS-B", options=tight)
    both = torch.from_numpy(found.x.reshape(shape)).to(features)
    return both[:, :-1].contiguous(), both[:, -1].contiguous()


def choose_strength(features: Tensor, labels: Tensor, classes: int, offset: Tensor | None = None) -> float:
    """The C of `STRENGTHS` with the best likelihood of held-out images; `USUAL` where none can be held out.

    Each is judged at its best temperature, since calibration sets that. The choice does not depend on the
    order of images or classes.
    """
    fold = feature_folds(features, labels, _FOLDS)
    if int((fold >= 0).sum()) < 2 * _FOLDS:
        return USUAL
    found: dict[float, list[Tensor]] = {strength: [] for strength in STRENGTHS}
    truth = torch.cat([labels[fold == number] for number in range(_FOLDS)])
    for number in range(_FOLDS):
        held, used = fold == number, fold != number
        fitted, part = None, None if offset is None else offset[used]
        for strength in STRENGTHS:  # from the strongest penalty on: each fit begins at the one before
            fitted = fit_logistic(features[used], labels[used], classes, strength, part, fitted)
            logits = F.linear(features[held], *fitted)
            found[strength].append(logits if offset is None else logits + offset[held])

    def loss(strength: float) -> float:
        logits = torch.cat(found[strength])
        return min(float(F.cross_entropy(logits / temperature, truth)) for temperature in _TEMPERATURES)

    return min(STRENGTHS, key=loss)
