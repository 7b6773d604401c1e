"""Directions in which edits move the image feature, and random ones to compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from dear.errors import UsageError

DIRECTIONS = 2  #: default number of directions


def edit_directions(original: Tensor, edited: Tensor, count: int = DIRECTIONS) -> Tensor:
    """First right singular vectors of `edited - original` [n, E], the strongest first: [count, E], float64.

    >>> edit_directions(torch.zeros(2, 3), torch.tensor([[0.0, 2.0, 0.0], [0.0, 1.0, 0.0]]), 1).abs().tolist()
    [[0.0, 1.0, 0.0]]
    """
    shift = edited.double() - original.double()  # [n, E]
    if not bool(shift.abs().max() > 1e-9):
        raise UsageError(
            "edited images must have other features than the originals to find a direction, got equal ones; "
            "remove another property"
        )
    axes: Tensor = torch.linalg.svd(shift, full_matrices=False).Vh
    return axes[:count]


def random_directions(width: int, count: int = DIRECTIONS, seed: int = 1) -> Tensor:
    """Random orthonormal directions [count, width], float64, as a baseline for `edit_directions`."""
    vectors = torch.randn(width, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    basis: Tensor = torch.linalg.qr(vectors).Q
    return basis.T
