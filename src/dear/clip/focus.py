"""The image feature with the exact contribution of some heads beside it, in one run of the tower.

A head's term of the image feature is linear in its class-token output once the standard deviation that the
final norm divides by is known (`dear.heads.contributions`). So the sum of the terms of some heads costs a few
products more than the feature itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dear.clip.config import Head
from dear.clip.edit import Record
from dear.clip.tower import Block

if TYPE_CHECKING:
    from dear.clip.towers import VisionTower


class _ClassRow(Record):
    """Records the class token where only that is read; the device is not waited for to find it."""

    def rows_within(self, read: Tensor, length: int) -> Tensor | None:
        """The class token is the first row read."""
        return torch.zeros(1, dtype=torch.long, device=read.device)


def focused_features(visual: VisionTower, pixels: Tensor, groups: Sequence[Sequence[Head]]) -> Tensor:
    """Image features and the sum of the terms of each of G groups of heads, [B, (1 + G) E].

    A correction of the feature applies to the terms as well: heads that it leaves out add nothing, and its
    matrix acts on what the others add.
    """
    return focused_from(visual, visual.embed(pixels), 1, groups)


def focused_from(visual: VisionTower, x: Tensor, first: int, groups: Sequence[Sequence[Head]]) -> Tensor:
    """The same from x [B, N, D], the input of layer `first`, which no head of the groups is before."""
    layers = sorted({layer for heads in groups for layer, _ in heads})
    record, norm = _ClassRow(), visual.ln_post
    start = max(first, min([*layers, *(layer for layer, _ in visual.ablated_heads)]))
    x = visual.run(x, first, start - 1)
    rows = visual.run(x, first=start, read=visual.read_rows(), record=record)  # [B, 1, D]
    wide = rows[:, 0].float()
    if visual.ablated_heads:  # the rows carry the standard deviation as their mean
        spread = wide.mean(dim=-1, keepdim=True)
    else:
        spread = (wide.var(dim=-1, keepdim=True, unbiased=False) + norm.eps).sqrt()
    found = [visual.features(rows)]
    for heads in groups:
        added = torch.zeros_like(wide)
        for layer in sorted({layer for layer, _ in heads}):
            block = visual.blocks[layer - 1]
            assert isinstance(block, Block)
            own = [head for at, head in heads if at == layer and (at, head) not in visual.ablated_heads]
            weight = block.attn.o.weight.float().T.unflatten(0, (visual.config.heads, -1))[own]  # [h, d, D]
            outputs = record[f"blocks.{layer}.attn.heads"][:, own, 0].float()  # [B, h, d]
            added = added + outputs.flatten(1) @ weight.flatten(0, 1)
        centered = (added - added.mean(dim=-1, keepdim=True)) / spread
        terms = (centered * norm.weight.float()) @ visual.space_matrix().float()
        if visual.correction_matrix is not None:
            terms = terms @ visual.correction_matrix.to(terms.dtype)
        found.append(terms.to(found[0].dtype))
    return torch.cat(found, dim=-1)
