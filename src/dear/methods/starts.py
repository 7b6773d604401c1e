"""Initialization of learned tensors: random numbers from a method's own generator, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(generator: torch.Generator, *shape: int, std: float = 0.02) -> Tensor:
    """Normal numbers around 0; 0.02 is CLIP's own spread of token embeddings."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * std


def uniform(generator: torch.Generator, *shape: int, inputs: int) -> Tensor:
    """Uniform within 1/sqrt(inputs): how PyTorch starts the weight and bias of a linear layer.

    >>> float(uniform(torch.Generator().manual_seed(0), 1000, inputs=4).abs().max()) < 0.5
    True
    """
    bound = max(1, inputs) ** -0.5
    return torch.rand(*shape, generator=generator, dtype=torch.float64).mul(2).sub(1).mul(bound)


def linear(generator: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Weight [..., out, in] and bias [..., out] of a linear layer, as PyTorch starts them.

    >>> [list(t.shape) for t in linear(torch.Generator(), 3, 4)]
    [[3, 4], [3]]
    """
    return uniform(generator, *shape, inputs=shape[-1]), uniform(generator, *shape[:-1], inputs=shape[-1])
