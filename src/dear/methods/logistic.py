"""Multinomial logistic regression with an L2 penalty, fitted by L-BFGS; its strength by cross-validation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

STRENGTHS = (10.0, 100.0, 1000.0)  #: C to choose from
USUAL = 100.0  #: C where too few images can be held out to choose
_FOLDS = 4
_STEPS = 100
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

    Args:
        features: [n, W].
        labels: [n].
        classes: how many.
        strength: C, as in scikit-learn.
        offset: [n, C], added to the logits.
        start: weight and bias to begin with; None: 0.
    """
    if start is None:
        start = features.new_zeros(classes, features.shape[1]), features.new_zeros(classes)
    parameters = [tensor.clone().requires_grad_() for tensor in start]
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=_STEPS, history_size=20, tolerance_grad=1e-6, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = F.linear(features, *parameters)
        loss = F.cross_entropy(logits if offset is None else logits + offset, labels)
        loss = loss + parameters[0].square().sum() / (2 * strength * len(features))
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return parameters[0].detach(), parameters[1].detach()


def choose_strength(features: Tensor, labels: Tensor, classes: int, offset: Tensor | None = None) -> float:
    """The C of `STRENGTHS` with the best likelihood of held-out images; `USUAL` where none can be held out.

    Each is judged at its best temperature, since calibration sets that. The only image of a class is never
    held out: without it the class could not be learned.
    """
    fold = _folds(labels)
    if int((fold >= 0).sum()) < 2 * _FOLDS:
        return USUAL
    found: dict[float, list[Tensor]] = {strength: [] for strength in STRENGTHS}
    truth = torch.cat([labels[fold == number] for number in range(_FOLDS)])
    for number in range(_FOLDS):
        held, kept = fold == number, fold != number
        fitted, part = None, None if offset is None else offset[kept]
        for strength in STRENGTHS:  # from the strongest penalty on: each fit begins at the one before
            fitted = fit_logistic(features[kept], labels[kept], classes, strength, part, fitted)
            logits = F.linear(features[held], *fitted)
            found[strength].append(logits if offset is None else logits + offset[held])

    def loss(strength: float) -> float:
        logits = torch.cat(found[strength])
        return min(float(F.cross_entropy(logits / temperature, truth)) for temperature in _TEMPERATURES)

    return min(STRENGTHS, key=loss)


def _folds(labels: Tensor) -> Tensor:
    """The fold of each image, every class dealt out evenly; -1 for the only image of a class."""
    generator = torch.Generator().manual_seed(0)
    fold = torch.full_like(labels, -1)
    dealt = 0
    for label in labels.unique().tolist():
        own = (labels == label).nonzero()[:, 0]
        if len(own) > 1:
            order = torch.randperm(len(own), generator=generator).to(own.device)
            fold[own[order]] = (dealt + torch.arange(len(own), device=own.device)) % _FOLDS
            dealt += 1
    return fold
