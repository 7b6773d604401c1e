"""Rotary positions in two dimensions: each pair of a head's channels is rotated by an angle.

The angle of the first half of the channels depends on the column, that of the second half on the row; columns
and rows count from 1 where there is a class token. The class token and extra tokens have no position in the
image and are not rotated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dear.clip.config import VisionConfig

_BASE = 10_000.0


class RotaryAngles(NamedTuple):
    """Cosines and sines of a sequence's angles, [N, d] each."""

    cos: Tensor
    sin: Tensor

    def at(self, rows: Tensor | None) -> RotaryAngles:
        """The angles of rows [R] or [B, R]: [R, d] or [B, 1, R, d], to multiply with [B, H, R, d]."""
        if rows is None:
            return self
        if rows.ndim == 1:
            return RotaryAngles(self.cos[rows], self.sin[rows])
        return RotaryAngles(self.cos[rows][:, None], self.sin[rows][:, None])

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate q or k [B, H, N, d]."""
        pairs = x.unflatten(-1, (-1, 2))  # [B, H, N, d/2, 2]
        swapped = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)  # [B, H, N, d]
        return x * self.cos.to(x.dtype) + swapped * self.sin.to(x.dtype)

    def with_unrotated_rows(self, count: int, at: int | None) -> RotaryAngles:
        """The angles with `count` rows of angle 0 inserted before row `at`; None: at the end."""
        at = len(self.cos) if at is None else at
        ones = self.cos.new_ones(count, self.cos.shape[1])
        zeros = self.sin.new_zeros(count, self.sin.shape[1])
        return RotaryAngles(
            torch.cat([self.cos[:at], ones, self.cos[at:]]), torch.cat([self.sin[:at], zeros, self.sin[at:]])
        )


def grid_angles(config: VisionConfig, device: torch.device) -> RotaryAngles:
    """The angles of an image tower's N original tokens, [N, d]."""
    half = config.head_width // 2  # channels per axis
    frequencies = _BASE ** (
        -torch.arange(0, half, 2, device=device, dtype=torch.float32) / half
    )  # [half / 2]
    coordinates = torch.arange(config.side, device=device, dtype=torch.float32) + int(config.class_token)
    angles = (coordinates[:, None] * frequencies).repeat_interleave(2, dim=1)  # [side, half]
    columns = angles[None].expand(config.side, -1, -1)  # [side, side, half]
    rows = angles[:, None].expand(-1, config.side, -1)
    angles = torch.cat([columns, rows], dim=-1).flatten(0, 1)  # [side^2, d]
    if config.class_token:
        angles = torch.cat([angles.new_zeros(1, angles.shape[1]), angles])
    return RotaryAngles(angles.cos(), angles.sin())
