"""Maximum mean discrepancy: how far apart the features of several domains lie (Gretton et al., JMLR 2012)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  #: kernels around the median distance


def kernels(x: Tensor, bandwidths: Sequence[float] | None = None) -> Tensor:
    """Mean of Gaussian kernels exp(-|x_i - x_j|^2 / 2 s^2) over bandwidths s.

    Args:
        x: features [L, n, D]; each of the L sets on its own.
        bandwidths: s; None takes `2 s^2 = factor * median of the squared distances` for the `FACTORS`.

    Returns:
        [L, n, n].
    """
    norms = (x * x).sum(-1)
    squared = (norms[:, :, None] + norms[:, None] - 2 * x @ x.transpose(1, 2)).clamp(min=0)  # [L, n, n]
    if bandwidths is None:
        n = x.shape[1]
        apart = ~torch.eye(n, dtype=torch.bool, device=x.device)
        median = squared.detach()[:, apart].median(dim=1).values.clamp(min=torch.finfo(x.dtype).tiny)
        widths = [factor * median[:, None, None] for factor in FACTORS]
    else:
        widths = [x.new_tensor(2 * s * s) for s in bandwidths]
    return torch.stack([torch.exp(-squared / width) for width in widths]).mean(dim=0)


def mmd(x: Tensor, domains: Tensor, bandwidths: Sequence[float] | None = None) -> Tensor:
    """Squared MMD, mean over the L feature sets and over the pairs of domains present.

    Args:
        x: features [n, L, D].
        domains: domain number of each row, [n].
        bandwidths: see `kernels`.

    Returns:
        A scalar, at least 0 up to rounding; 0 with fewer than two domains.

    >>> x = torch.tensor([[[0.0]], [[0.0]], [[9.0]], [[9.0]]])
    >>> round(float(mmd(x, torch.tensor([0, 0, 1, 1]), [1.0])), 4), float(mmd(x, torch.tensor([0, 1, 0, 1])))
    (2.0, 0.0)
    """
    present, place = domains.unique(return_inverse=True)
    if len(present) < 2:
        return (x * 0).sum()
    belongs = F.one_hot(place, len(present)).to(x.dtype)
    share = belongs / belongs.sum(dim=0)  # [n, G]: columns are means over a domain
    mean = share.T @ kernels(x.transpose(0, 1), bandwidths) @ share  # [L, G, G]
    own = mean.diagonal(dim1=1, dim2=2)
    gaps = own[:, :, None] + own[:, None] - 2 * mean  # [L, G, G], zero on the diagonal
    pairs = len(present) * (len(present) - 1)
    return gaps.sum(dim=(1, 2)).mean() / pairs
