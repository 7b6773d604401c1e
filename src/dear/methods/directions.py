"""Class directions: what training images add to the texts of their classes, in closed form.

X [n, E] are the frozen unit features of the training images less their mean, divided by their mean length;
Y [n, C] the labels, one-hot, less the classes' shares. Ridge regression returns a direction per class,
`R = Y^T X A` with `A = (X^T X + ridge)^-1`; for a large ridge its rows point from the mean to class means.

Without one image x with residual e = y - R x, the same regression returns `R - e (A x)^T / (1 - x^T A x)`.
So training and the choice of lambda compare each image with directions that do not contain it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dear.methods.tensors import indicators, label_loss

LARGEST_LEVERAGE = 0.9  # of a view, which is not exactly the image that the regression has seen
# Share of its length that a direction keeps at least: without its only image, next to nothing remains of one.
SHORTEST = 0.25
WEIGHTS = torch.logspace(-1.7, 0.3, 21, dtype=torch.float64)  # lambda, 0.02 to 2
MOST_IMAGES = 4096  # that the choice of lambda reads


class Directions(NamedTuple):
    """A direction per class, and what is needed to leave an image out."""

    rows: Tensor  #: R [C, E]
    inverse: Tensor  #: A [E, E]
    shares: Tensor  #: of the training images, per class [C]
    length: Tensor  #: mean length of a feature less the mean of all, []
    leaves_out: Tensor  #: []; 1: some class has two training images or more, so that one can be left out


def fit_directions(features: Tensor, labels: Tensor, classes: int, ridge: float) -> Directions:
    """Directions from unit features [n, E] and labels [n].

    Args:
        features: frozen unit features of the training images.
        labels: places of their classes, or rows [n, C] of several labels.
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
    truth = indicators(labels, classes).to(x)
    shares = truth.mean(dim=0)
    inverse = torch.linalg.inv(x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device))
    several = (truth.sum(dim=0).max() > 1).to(x)
    return Directions((truth - shares).T @ x @ inverse, inverse, shares, length, several)


def leave_out(
    x: Tensor, labels: Tensor, rows: Tensor, inverse: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """How R changes without an image: `R[c] - change[b, c] moved[b]` for image b.

    Args:
        x: features of the images, as the regression has seen them [B, E].
        labels: places of their classes [B], or rows [B, C] of several labels.
        rows: R [C, E].
        inverse: A [E, E].
        shares: of the classes among the training images [C].

    Returns:
        `change` [B, C] and `moved` [B, E].
    """
    moved = x @ inverse
    leverage = (x * moved).sum(dim=-1, keepdim=True).clamp(max=LARGEST_LEVERAGE)
    residual = indicators(labels, len(rows)).to(x) - shares - x @ rows.T
    return residual / (1 - leverage), moved


def compare_without_image(
    x: Tensor, labels: Tensor, texts: Tensor, directions: Directions, weight: Tensor
) -> Callable[[Tensor], Tensor]:
    """From image features [B, E] to products [B, C] with `unit(t_c + weight unit(r_c))`, each image left out.

    Args:
        x: frozen features of the images, as the regression has seen them [B, E].
        labels: places of their classes [B], or rows [B, C] of several labels.
        texts: unit text features t_c [C, E].
        directions: of the classes; where no image can be left out, they are used as they are.
        weight: lambda, [].
    """
    rows = directions.rows
    change, moved = leave_out(x, labels, rows, directions.inverse, directions.shares)
    change = directions.leaves_out * change
    full = rows.square().sum(dim=-1)  # [C]
    squared = full - change * (2 * moved @ rows.T - change * moved.square().sum(dim=-1, keepdim=True))
    share = weight / torch.maximum(squared, SHORTEST**2 * full).clamp(min=1e-24).sqrt()  # [B, C]
    along = (texts * rows).sum(dim=-1) - change * (moved @ texts.T)
    size = (1 + share * (share * squared + 2 * along)).clamp(min=1e-12).sqrt()

    def products(images: Tensor) -> Tensor:
        directed = images @ rows.T - change * (images * moved).sum(dim=-1, keepdim=True)
        return (images @ texts.T + share * directed) / size

    return products


def choose_weight(
    features: Tensor, labels: Tensor, texts: Tensor, directions: Directions, center: float, scale: float
) -> Tensor:
    """The lambda of `WEIGHTS` with the smallest leave-one-out loss on frozen features, [].

    Args:
        features: unit features of the training images [n, E].
        labels: places of their classes [n], or rows [n, C] of several labels.
        texts: unit text features [C, E].
        directions: fitted to the same images.
        center: fraction of the mean feature that is subtracted before the comparison.
        scale: of the logits.
    """
    features, texts = features.double(), texts.double()
    mean = features.mean(dim=0)
    step = -(-len(features) // MOST_IMAGES)
    features, labels = features[::step], labels[::step]
    x, images = (features - mean) / directions.length, features - center * mean
    weights = WEIGHTS.to(features.device)
    losses = [
        label_loss(scale * compare_without_image(x, labels, texts, directions, weight)(images), labels)
        for weight in weights
    ]
    return weights[torch.stack(losses).argmin()]
