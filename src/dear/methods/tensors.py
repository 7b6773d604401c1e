"""Unit features, CLIP's logits, distances, losses, and initial values of learned tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.model import Clip


def unit(x: Tensor) -> Tensor:
    """Features [..., E] of length 1, at least in float32: cosines and logits need the precision."""
    return F.normalize(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x, dim=-1)


def scores(clip: Clip, images: Tensor, texts: Tensor) -> Tensor:
    """CLIP's logits [B, C]: temperature times the cosines of features [B, E] and [C, E]."""
    return clip.logit_scale * unit(images) @ unit(texts).T


def distance(adapted: Tensor, frozen: Tensor) -> Tensor:
    """Mean over rows of 1 - cosine, for unit features [n, E].

    >>> float(distance(torch.eye(2), torch.eye(2).flip(0)))
    1.0
    """
    return (1 - (adapted * frozen).sum(-1)).mean()


def normal(generator: torch.Generator, *shape: int, std: float = 0.02) -> Tensor:
    """Normal random numbers with mean 0; 0.02 is the deviation of CLIP's token embeddings."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * std


def uniform(generator: torch.Generator, *shape: int, inputs: int) -> Tensor:
    """Uniform random numbers within 1/sqrt(inputs), as PyTorch initializes a linear layer.

    >>> float(uniform(torch.Generator().manual_seed(0), 1000, inputs=4).abs().max()) < 0.5
    True
    """
    bound = max(1, inputs) ** -0.5
    return torch.rand(*shape, generator=generator, dtype=torch.float64).mul(2).sub(1).mul(bound)


def linear(generator: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Weight [..., out, in] and bias [..., out] of a linear layer, as PyTorch initializes them.

    >>> [list(t.shape) for t in linear(torch.Generator(), 3, 4)]
    [[3, 4], [3]]
    """
    return uniform(generator, *shape, inputs=shape[-1]), uniform(generator, *shape[:-1], inputs=shape[-1])


def indicators(labels: Tensor, classes: int) -> Tensor:
    """Labels [n] as one-hot rows [n, C]; rows [n, C] of several labels are returned unchanged.

    >>> indicators(torch.tensor([1, 0]), 2).tolist(), indicators(torch.tensor([[1.0, 1.0]]), 2).tolist()
    ([[0, 1], [1, 0]], [[1.0, 1.0]])
    """
    return F.one_hot(labels, classes) if labels.ndim == 1 else labels


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [B, C] and labels [B], or binary cross-entropy for rows [B, C] of labels.

    CLIP's logits have an arbitrary offset. Binary cross-entropy needs a threshold, which is the mean logit of
    the batch, shifted by the log odds of a label. Calibration sets the threshold of each class afterwards.
    """
    if labels.ndim == 1:
        return F.cross_entropy(logits, labels)
    share = labels.mean().clamp(1e-3, 1 - 1e-3)
    centered = logits - logits.detach().mean() + (share / (1 - share)).log()
    return F.binary_cross_entropy_with_logits(centered, labels.to(centered.dtype))
