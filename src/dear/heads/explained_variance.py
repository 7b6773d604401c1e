"""Variance of a head's contribution that a known factor explains: ground truth for roles.

Where the value of a factor (say the color) is known for every image, a head's contribution varies between
the groups of equal value and within them. The share between is the factor's explained variance for that head,
summed over the E numbers of the contribution (a multivariate eta squared).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dear.errors import UsageError


def explained_variance(outputs: Tensor, maps: Tensor, values: Tensor) -> Tensor:
    """Share of each head's variance that lies between groups of equal value.

    Args:
        outputs: [n, L, H, d], scaled head outputs of n images (`dear.heads.contributions.head_outputs`).
        maps: [L, H, d, E], what turns an output into a contribution (`head_maps`).
        values: int [n], the factor's value in each image.

    Returns:
        [L, H], between 0 (the factor plays no part) and 1 (it explains everything).

    Example:
        >>> outputs = torch.tensor([1.0, 1.0, -1.0, -1.0]).view(4, 1, 1, 1)
        >>> explained_variance(outputs, torch.ones(1, 1, 1, 2), torch.tensor([0, 0, 1, 1])).item()
        1.0
    """
    groups, index = values.unique(return_inverse=True)
    if len(groups) < 2:
        raise UsageError("explained variance needs a factor with at least two values among the images")
    centered = (outputs - outputs.mean(0)).double()  # [n, L, H, d]
    counts = torch.bincount(index).double()  # [G]
    sums = torch.zeros(len(groups), *centered.shape[1:], dtype=torch.double, device=centered.device)
    means = sums.index_add_(0, index, centered) / counts.view(-1, 1, 1, 1)  # [G, L, H, d]
    metric = maps.double() @ maps.double().mT  # [L, H, d, d]: lengths in feature space
    between = torch.einsum("g,glhd,lhde,glhe->lh", counts, means, metric, means)
    total = torch.einsum("nlhd,lhde,nlhe->lh", centered, metric, centered)
    return (between / total.clamp_min(1e-30)).float()
