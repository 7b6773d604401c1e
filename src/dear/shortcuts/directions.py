"""Directions of a feature along which an edit moves images."""

from __future__ import annotations

import torch
from torch import Tensor

from dear.errors import UsageError

DIRECTIONS = 2


def edit_directions(original: Tensor, edited: Tensor, count: int = DIRECTIONS) -> Tensor:
    """First right singular vectors of `edited - original` [n, E], the strongest first: [count, E], float64.

    >>> edit_directions(torch.zeros(2, 3), torch.tensor([[0.0, 2.0, 0.0], [0.0, 1.0, 0.0]]), 1).abs().tolist()
    [[0.0, 1.0, 0.0]]
    """
    moved = edited.double() - original.double()
    if not bool(moved.abs().max() > 1e-9):
        raise UsageError("the edited images give the same features: there is no direction to remove")
    axes: Tensor = torch.linalg.svd(moved, full_matrices=False).Vh
    return axes[:count]


def random_directions(width: int, count: int = DIRECTIONS, seed: int = 1) -> Tensor:
    """As many orthonormal directions drawn at random, [count, width], float64: what a repair must beat."""
    drawn = torch.randn(width, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    basis: Tensor = torch.linalg.qr(drawn).Q
    return basis.T
