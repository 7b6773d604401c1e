"""Rotary positions in two dimensions: each pair of a head's channels is turned by an angle.

The first half of the channels turns with the column, the second with the row; columns and rows count from 1
where there is a class token, which is not turned. Extra tokens have no place in the image and are not turned.
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
        """Those of some rows, [R] or [B, R]; shaped to be multiplied with [B, H, R, d]."""
        if rows is None:
            return self
        if rows.ndim == 1:
            return RotaryAngles(self.cos[rows], self.sin[rows])
        return RotaryAngles(self.cos[rows][:, None], self.sin[rows][:, None])

    def __call__(self, x: Tensor) -> Tensor:
        """Turn q or k [B, H, N, d]."""
        pairs = x.unflatten(-1, (-1, 2))
        swapped = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
        return x * self.cos.to(x.dtype) + swapped * self.sin.to(x.dtype)

    def with_unrotated_rows(self, count: int, at: int | None) -> RotaryAngles:
        """With `count` rows that are not turned put in at a place; None: at the end."""
        at = len(self.cos) if at is None else at
        ones, zeros = (
            self.cos.new_ones(count, self.cos.shape[1]),
            self.sin.new_zeros(count, self.sin.shape[1]),
        )
        return RotaryAngles(
            torch.cat([self.cos[:at], ones, self.cos[at:]]), torch.cat([self.sin[:at], zeros, self.sin[at:]])
        )


def grid_angles(config: VisionConfig, device: torch.device) -> RotaryAngles:
    """The angles of an image tower's tokens."""
    half = config.head_width // 2  # channels per axis
    speeds = _BASE ** (-torch.arange(0, half, 2, device=device, dtype=torch.float32) / half)  # [half / 2]
    places = torch.arange(config.side, device=device, dtype=torch.float32) + int(config.class_token)
    angles = (places[:, None] * speeds).repeat_interleave(2, dim=1)  # [side, half]
    columns = angles[None].expand(config.side, -1, -1)  # [side, side, half]
    rows = angles[:, None].expand(-1, config.side, -1)
    angles = torch.cat([columns, rows], dim=-1).flatten(0, 1)  # [side^2, d]
    if config.class_token:
        angles = torch.cat([angles.new_zeros(1, angles.shape[1]), angles])
    return RotaryAngles(angles.cos(), angles.sin())
