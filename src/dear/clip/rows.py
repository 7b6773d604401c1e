"""Rows of the last layer as input of the final norm, with or without the terms of some heads.

The final norm divides a row x [D] by its standard deviation s, the *spread*. For a fixed s the norm is
linear, so every vector that was added to the row has a term of the image feature: `direct_term`. Removing
heads keeps s and removes their terms: with d the sum of what they added to the row, the feature is
`(center(x - d) / s * w + c) P`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.config import Head
from dear.clip.edit import Edit, Record
from dear.clip.tower import Block, LayerRange, take_rows
from dear.errors import UsageError

if TYPE_CHECKING:
    from dear.clip.towers import VisionTower


class Rows(NamedTuple):
    """Rows of the last layer, as `VisionTower.final_rows` returns them."""

    x: Tensor  #: [B, R, D]
    removed: Tensor | None = None  #: [B, R, D], what the removed heads added to them
    spread: Tensor | None = None  #: [B, R, 1], what the final norm divides by; None: `spread_of(x)`


def spread_of(x: Tensor, eps: float) -> Tensor:
    """Standard deviation [..., 1] by which a norm with `eps` divides rows [..., D]."""
    return (x.var(dim=-1, keepdim=True, unbiased=False) + eps).sqrt()


def final_norm(rows: Rows, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Rows after the final norm with weight and bias [D]: [B, R, D] in the precision of the weight."""
    x = rows.x.to(weight.dtype)
    if rows.removed is None and rows.spread is None:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    spread = spread_of(x, eps) if rows.spread is None else rows.spread.to(weight.dtype)
    rest = x if rows.removed is None else x - rows.removed.to(weight.dtype)
    return (rest - rest.mean(dim=-1, keepdim=True)) / spread * weight + bias


def direct_term(visual: VisionTower, added: Tensor, spread: Tensor | None = None) -> Tensor:
    """The term of the image feature of vectors [..., D] that were added to a row, [..., E] in float32.

    Args:
        visual: the tower; a correction of its feature is not applied.
        added: float32 [..., D].
        spread: of the row, [..., 1]; None: 1.
    """
    centered = added - added.mean(dim=-1, keepdim=True)  # the norm subtracts the mean over the width
    if spread is not None:
        centered = centered / spread
    return (centered * visual.ln_post.weight.float()) @ visual.projection_matrix().float()


def head_sum(visual: VisionTower, record: Record, heads: Sequence[Head], x: Tensor) -> Tensor:
    """The sum of what heads added to the class token, float32 [B, D] as x, from a record of its row."""
    total = torch.zeros_like(x)
    for layer in sorted({layer for layer, _ in heads}):
        block = visual.blocks[layer - 1]
        assert isinstance(block, Block)
        numbers = [head for number, head in heads if number == layer]
        weight = block.attn.o.weight.float().T.unflatten(0, (visual.config.heads, -1))[numbers]  # [h, d, D]
        outputs = record[f"blocks.{layer}.attn.heads"][:, numbers, 0].float()  # [B, h, d]
        total = total + outputs.flatten(1) @ weight.flatten(0, 1)  # [B, h·d] @ [h·d, D]
    return total


class ClassRow(Record):
    """Records the class token of runs that read only this row, without synchronizing with the device."""

    def rows_within(self, read: Tensor, length: int) -> Tensor | None:
        """The class token is the first row that is read."""
        return torch.zeros(1, dtype=torch.long, device=read.device)


class _HeadRows(Record):
    """Records the heads' outputs of all rows of some layers, and forwards everything to another record."""

    def __init__(self, layers: set[int], other: Record | None) -> None:
        super().__init__(slice(None), pattern=other is not None and other.pattern)
        self._names = {f"blocks.{layer}.attn.heads" for layer in layers}
        self._other = other

    def rows_within(self, read: Tensor, length: int) -> Tensor | None:
        """None: all rows are recorded, not only those that are read."""
        return None

    def keep(self, name: str, value: Tensor) -> None:
        """Store the heads' outputs of the chosen layers."""
        if name in self._names:
            super().keep(name, value)
        if self._other is not None:
            rows = self._other.rows
            self._other.keep(name, value[:, :, rows] if ".attn." in name else value[:, rows])


def rows_without_heads(tower: VisionTower, layers: LayerRange) -> Rows:
    """Run layers up to the last one, and collect what `tower.removed_heads` added to the rows."""
    x, first, last, edit, read, record = layers
    if tower.pool is not None:
        raise UsageError(
            "exact removal of heads needs a class token, but this image tower pools its tokens by attention; "
            "remove the concept by words or by examples"
        )
    removed_from = {layer for layer, _ in tower.removed_heads}
    if min(removed_from) < first:
        raise UsageError(
            f"removed heads must be in layer {first} or later, where this method starts, got layer "
            f"{min(removed_from)}; remove the concept by words or by examples, or with heads of later layers"
        )
    outputs = _HeadRows(removed_from, record)
    rows = tower.run(x, first, edit=edit, read=read, record=outputs)  # [B, R, D]
    removed = torch.zeros_like(rows, dtype=tower.ln_post.weight.dtype)
    width = tower.config.head_width
    for layer, head in tower.removed_heads:
        z = outputs[f"blocks.{layer}.attn.heads"][:, head]  # [B, N, d]
        if read is not None:
            early = edit is not None and edit.first is not None and layer < edit.first
            z = _rows_before_insertion(z, read) if early else take_rows(z, read)  # [B, R, d]
        if edit is not None and edit.count and edit.at is None:
            positions = torch.arange(z.shape[1], device=z.device) if read is None else read
            fraction = torch.where(
                positions < len(tower.positions), 1.0, remaining_fraction(edit, layer, last)
            )
            z = z * fraction[..., None].to(z.dtype)
        block = tower.blocks[layer - 1]
        assert isinstance(block, Block)
        weight: Tensor = block.attn.o.weight
        change = None if edit is None else edit.layers.get(layer)
        if change is not None and change.added is not None and "attn.o.weight" in change.added:
            weight = weight + change.added["attn.o.weight"]
        weight = weight[:, head * width : (head + 1) * width]  # [D, d]
        removed = removed + z.to(removed.dtype) @ weight.to(removed.dtype).T
    return Rows(rows, removed)


def remaining_fraction(edit: Edit, layer: int, last: int) -> float:
    """Fraction of a layer's update of the extra tokens that remains after layer `last`."""
    fraction = 1.0
    for later in range(layer + 1, last + 1):
        change = edit.layers.get(later)
        if change is not None and change.tokens is not None:
            fraction *= 1.0 - change.token_weight
    return fraction


def _rows_before_insertion(outputs: Tensor, read: Tensor) -> Tensor:
    """Rows `read` of a head's outputs [B, N, d] in a layer before the extra tokens: theirs are 0."""
    present = read < outputs.shape[1]
    rows = take_rows(outputs, read.clamp(max=outputs.shape[1] - 1))
    return rows * present[..., None].to(rows.dtype)
