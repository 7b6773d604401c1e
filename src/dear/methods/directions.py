"""Class directions: closed-form vectors from training images that are added to the texts of their classes.

X [n, E] are the frozen unit features of the training images minus their mean, divided by their mean length; Y
[n, C] are the one-hot labels minus the class frequencies. Ridge regression returns one direction per class,
`R = Y^T X A` with `A = (X^T X + ridge)^-1`; for a large ridge its rows point from the mean to the class
means.

Without image x with residual e = y - R x, the same regression returns `R - e (A x)^T / (1 - x^T A x)`, so
training and the choice of lambda can compare each image with directions that were fitted without it. Copies
of an image, and its repeats in a balanced set, together have the weight of one image in the regression, so
that leaving out x leaves out all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dear.data.folds import IntArray, equal_rows
from dear.methods.tensors import indicators, label_loss, unit

# A random view is not exactly the image that was fitted, so its leverage x^T A x may come too close to 1.
LARGEST_LEVERAGE = 0.9
# Smallest length of a leave-one-out direction, relative to the full one: a class without its only image has
# almost no direction, and normalizing it would amplify noise.
SHORTEST = 0.25
WEIGHTS = torch.logspace(-1.7, 0.3, 21, dtype=torch.float64)  # candidates for lambda, 0.02 to 2
MOST_IMAGES = 4096  # images used for the choice of lambda


class Directions(NamedTuple):
    """One direction per class, and the terms needed to leave an image out."""

    rows: Tensor  #: R [C, E]
    inverse: Tensor  #: A [E, E]
    shares: Tensor  #: fraction of the training images in each class, copies counted once [C]
    length: Tensor  #: mean length of a centered feature, []
    leaves_out: Tensor  #: []; 1: some class has two training images that differ, so one can be left out


def fit_directions(
    features: Tensor, labels: Tensor, classes: int, ridge: float, units: IntArray | None = None
) -> Directions:
    """Directions from unit features [n, E] and labels [n].

    Args:
        features: frozen unit features of the training images.
        labels: class indices, or rows [n, C] of several labels.
        classes: number of classes C; a class without images has the direction 0.
        ridge: in units of a squared feature.
        units: [n], copies of an image have the same; None: images with equal features are copies.

    >>> features = torch.nn.functional.normalize(torch.eye(4, dtype=torch.float64) + 0.1, dim=1)
    >>> fitted = fit_directions(features, torch.tensor([0, 0, 1, 1]), 2, ridge=1.0)
    >>> fitted.rows.shape, (fitted.rows[0] + fitted.rows[1]).abs().max() < 1e-9
    (torch.Size([2, 4]), tensor(True))
    """
    x = features.double() - features.double().mean(dim=0)
    length = x.norm(dim=1).mean().clamp(min=1e-12)  # 0 for a single image
    x = x / length
    truth = indicators(labels, classes).to(x)  # [n, C]
    weights = _copy_weights(equal_rows(features) if units is None else units).to(x)[:, None]  # [n, 1]
    counts = (weights * truth).sum(dim=0)  # images per class, copies counted once [C]
    shares = counts / weights.sum()
    weighted = weights * x  # [n, E]
    inverse = torch.linalg.inv(weighted.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device))
    leaves_out = (counts.max() > 1 + 1e-6).to(x)
    return Directions((truth - shares).T @ weighted @ inverse, inverse, shares, length, leaves_out)


def _copy_weights(units: IntArray) -> Tensor:
    """The weight of each image [n]: 1 divided by the number of its copies, itself included.

    >>> _copy_weights(np.array([0, 1, 1]))
    tensor([1.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    _, inverse, counts = np.unique(units, return_inverse=True, return_counts=True)
    return torch.from_numpy(1.0 / counts[inverse])


def leave_out(
    x: Tensor, labels: Tensor, rows: Tensor, inverse: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """Directions without image b are `R[c] - step[b, c] x_A[b]`; returns `step` [B, C] and `x_A` [B, E].

    Args:
        x: features of the images, centered and scaled as in the regression [B, E].
        labels: class indices [B], or rows [B, C] of several labels.
        rows: R [C, E].
        inverse: A [E, E].
        shares: fraction of the training images in each class [C].
    """
    x_A = x @ inverse
    leverage = (x * x_A).sum(dim=-1, keepdim=True).clamp(max=LARGEST_LEVERAGE)  # [B, 1]
    residual = indicators(labels, len(rows)).to(x) - shares - x @ rows.T  # [B, C]
    return residual / (1 - leverage), x_A


def compare_without_image(
    x: Tensor, labels: Tensor, texts: Tensor, directions: Directions, weight: Tensor
) -> Callable[[Tensor], Tensor]:
    """A function from image features [B, E] to products [B, C] with `unit(t_c + weight unit(r_c))`.

    r_c are the directions without the image itself. They are never computed, because there are B C of them:
    lengths and products follow from R, `step` and `x_A`.

    Args:
        x: frozen features of the images, centered and scaled as in the regression [B, E].
        labels: class indices [B], or rows [B, C] of several labels.
        texts: unit text features t_c [C, E].
        directions: of the classes; if no image can be left out, they are used unchanged.
        weight: lambda, [].
    """
    rows = directions.rows
    step, x_A = leave_out(x, labels, rows, directions.inverse, directions.shares)
    step = directions.leaves_out * step  # [B, C]
    full_squared = rows.square().sum(dim=-1)  # |R_c|^2 [C]
    # |r_c|^2 [B, C]
    squared = full_squared - step * (2 * x_A @ rows.T - step * x_A.square().sum(dim=-1, keepdim=True))
    scale = weight / torch.maximum(squared, SHORTEST**2 * full_squared).clamp(min=1e-24).sqrt()  # [B, C]
    text_products = (texts * rows).sum(dim=-1) - step * (x_A @ texts.T)  # t_c . r_c [B, C]
    length = (1 + scale * (scale * squared + 2 * text_products)).clamp(min=1e-12).sqrt()  # |t_c + scale r_c|

    def products(images: Tensor) -> Tensor:
        with_directions = images @ rows.T - step * (images * x_A).sum(dim=-1, keepdim=True)  # [B, C]
        return (images @ texts.T + scale * with_directions) / length

    return products


def choose_direction_weight(
    features: Tensor, labels: Tensor, texts: Tensor, directions: Directions, center: float, scale: float
) -> Tensor:
    """The lambda of `WEIGHTS` with the smallest leave-one-out loss on frozen features, [].

    Args:
        features: unit features of the training images [n, E].
        labels: class indices [n], or rows [n, C] of several labels.
        texts: unit text features [C, E].
        directions: fitted to the same images.
        center: fraction of the mean feature that is subtracted before the comparison.
        scale: CLIP's logit scale.
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


def initial_weight(
    features: Tensor,
    labels: Tensor,
    texts: Tensor,
    directions: Directions,
    center: float,
    scale: float,
    share_of_error: float,
) -> Tensor:
    """Lambda before training, []: that of `choose_direction_weight`, which takes the same arguments.

    With one image per class none can be left out; lambda is then `share_of_error` times the error of the
    frozen texts on the training images, and is not learned.
    """
    if directions.leaves_out:
        return choose_direction_weight(features, labels, texts, directions, center, scale)
    centered = features - features.mean(dim=0)
    predictions = (centered @ texts.to(centered).T).argmax(dim=1)  # [n]
    correct = indicators(labels, len(texts)).gather(1, predictions[:, None])[:, 0]  # [n]
    return share_of_error * (1 - correct.double()).mean().clamp(min=1e-3)


def add_directions(texts: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """`unit(t_c + weight unit(r_c))` of unit text features [C, E] and directions [C, E]."""
    return unit(texts + weight * unit(rows))


def align_totals(logits: Tensor, text_logits: Tensor, trained: Tensor) -> Tensor:
    """What to add to logits [B, C], so that trained classes get the total probability that texts give them.

    Args:
        logits: with directions in the columns of trained classes.
        text_logits: of texts alone [B, C].
        trained: whether each class was trained, bool [C]; new classes get 0.
    """
    # -inf excludes new classes from both sums
    text_logits, logits = (x.masked_fill(~trained, -math.inf) for x in (text_logits, logits))
    shift = text_logits.logsumexp(dim=1, keepdim=True) - logits.logsumexp(dim=1, keepdim=True)  # [B, 1]
    return shift * trained
