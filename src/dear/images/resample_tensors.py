"""Resizing of tensors as matrix products with Pillow's weights; every image has its own crop and scale."""

from __future__ import annotations

import torch
from torch import Tensor


def round_to_bytes(values: Tensor) -> Tensor:
    """Values rounded in place to 0..255, half up as in Pillow."""
    return values.add_(0.5).floor_().clamp_(0, 255)


def resampling_weights(
    start: Tensor,
    length: Tensor,
    extent: int,
    size: int,
    resized: Tensor | None = None,
    first: Tensor | None = None,
    bilinear: bool = False,
) -> Tensor:
    """Weights [B, size, extent] that resize `length` [B] pixels from `start` [B] on, bicubic, antialiased.

    The pixels are resized to `resized` [B], of which `size` from `first` [B] on are computed; by default to
    `size`, all of them. `extent` is the number of pixels of the whole axis; rows sum to 1 and are 0 outside
    the range.
    """
    device = start.device
    step = (length / (size if resized is None else resized))[:, None, None]  # source pixels per result pixel
    spread = step.clamp(min=1)  # the filter widens when images shrink: antialiasing
    source = torch.arange(extent, device=device)[None, None, :] - start[:, None, None]  # [B, 1, n]
    rows = torch.arange(size, device=device)[None, :, None]
    if first is not None:
        rows = rows + first[:, None, None]
    center = (rows + 0.5) * step  # [B, S, 1]
    distance = ((source + 0.5 - center) / spread).abs()
    weights = (1 - distance).clamp(min=0) if bilinear else _cubic(distance)  # [B, S, n]
    weights = weights * ((source >= 0) & (source < length[:, None, None]))
    return weights / weights.sum(-1, keepdim=True)


def _cubic(x: Tensor, a: float = -0.5) -> Tensor:
    """Keys' cubic convolution kernel of a distance, zero beyond 2."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
