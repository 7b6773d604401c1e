"""Class directions: what training images add to the texts of their classes, in closed form.

X [n, E] are the frozen unit features of the training images less their mean, divided by their mean length;
Y [n, C] the labels, one-hot, less the classes' shares. Ridge regression returns a direction per class,
`R = Y^T X A` with `A = (X^T X + ridge)^-1`; for a large ridge its rows point from the mean to class means.

Without one image x with residual e = y - R x, the same regression returns `R - e (A x)^T / (1 - x^T A x)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_LEVERAGE = 0.9  # of a view, which is not exactly the image that the regression has seen


class Directions(NamedTuple):
    """A direction per class, and what is needed to leave an image out."""

    rows: Tensor  #: R [C, E]
    inverse: Tensor  #: A [E, E]
    shares: Tensor  #: of the training images, per class [C]
    length: Tensor  #: mean length of a feature less the mean of all, []
    counts: Tensor  #: training images per class [C]


def fit_directions(features: Tensor, labels: Tensor, classes: int, ridge: float) -> Directions:
    """Directions from unit features [n, E] and labels [n].

    Args:
        features: frozen unit features of the training images.
        labels: places of their classes.
        classes: number of classes C; one without images has the direction 0.
        ridge: in units of a squared feature.

    >>> features = torch.nn.functional.normalize(torch.eye(4, dtype=torch.float64) + 0.1, dim=1)
    >>> fitted = fit_directions(features, torch.tensor([0, 0, 1, 1]), 2, ridge=1.0)
    >>> fitted.rows.shape, (fitted.rows[0] + fitted.rows[1]).abs().max() < 1e-9
    (torch.Size([2, 4]), tensor(True))
    """
    x = features.double() - features.double().mean(dim=0)
    length = x.norm(dim=1).mean().clamp(min=1e-12)  # one image alone is its own mean
    x = x / length
    truth = F.one_hot(labels, classes).to(x)
    shares = truth.mean(dim=0)
    inverse = torch.linalg.inv(x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device))
    return Directions((truth - shares).T @ x @ inverse, inverse, shares, length, truth.sum(dim=0))


def leave_out(
    x: Tensor, labels: Tensor, rows: Tensor, inverse: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """How R changes without an image: `R[c] - change[b, c] moved[b]` for image b.

    Args:
        x: features of the images, as the regression has seen them [B, E].
        labels: places of their classes [B].
        rows: R [C, E].
        inverse: A [E, E].
        shares: of the classes among the training images [C].

    Returns:
        `change` [B, C] and `moved` [B, E].
    """
    moved = x @ inverse
    leverage = (x * moved).sum(dim=-1, keepdim=True).clamp(max=LARGEST_LEVERAGE)
    residual = F.one_hot(labels, len(rows)).to(x) - shares - x @ rows.T
    return residual / (1 - leverage), moved
