"""The image feature without the terms of some heads: the direct effect of leaving them out, exactly.

Write x for a row of the last layer [D], s for the standard deviation that the final norm divides it by, and d
for the sum of what the heads left out added to this row. The feature without them is
`(center(x - d) / s * w + c) P`: s stays that of x. The final norm does not see the mean of a row, so that is
where s travels from `run` to `norm_rows`: the rows that `without_heads` returns are `center(x - d) + s`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dear.clip.edit import Edit, Record
from dear.clip.tower import Block, Stretch, take_rows
from dear.errors import UsageError

if TYPE_CHECKING:
    from dear.clip.towers import VisionTower


class _HeadRows(Record):
    """Keeps the output of all rows in the heads of some layers, and hands everything on to another record."""

    def __init__(self, layers: set[int], other: Record | None) -> None:
        super().__init__(slice(None), pattern=other is not None and other.pattern)
        self._names = {f"blocks.{layer}.attn.heads" for layer in layers}
        self._other = other

    def rows_within(self, read: Tensor, length: int) -> Tensor | None:
        """All rows are recorded: never only those read (and no device is waited for to find out)."""
        return None

    def keep(self, name: str, value: Tensor) -> None:
        """Store what is needed."""
        if name in self._names:
            super().keep(name, value)
        if self._other is not None:
            rows = self._other.rows
            self._other.keep(name, value[:, :, rows] if ".attn." in name else value[:, rows])


def without_heads(tower: VisionTower, run: Callable[[Stretch], Tensor], given: Stretch) -> Tensor:
    """Run a stretch up to the last layer; rows [B, R, D] for `norm_without_heads`."""
    first, last, edit, read = given.first, given.last, given.edit, given.read
    if tower.pool is not None:
        raise UsageError(
            "this image tower pools its tokens by attention, so heads cannot be left out exactly; remove the "
            "concept by words or by examples"
        )
    layers = {layer for layer, _ in tower.ablated_heads}
    if min(layers) < first:
        raise UsageError(
            f"heads of layer {min(layers)} are to be left out, but this method starts at layer {first}; "
            "remove the concept by words or by examples, or with heads of later layers"
        )
    own = _HeadRows(layers, given.record)
    rows = run(given._replace(record=own))
    added = torch.zeros_like(rows, dtype=tower.ln_post.weight.dtype)
    width = tower.config.head_width
    for layer, head in tower.ablated_heads:
        outputs = own[f"blocks.{layer}.attn.heads"][:, head]  # [B, N, d]
        if read is not None:
            late = edit is not None and edit.first is not None and layer < edit.first
            outputs = _rows_of_then(outputs, read) if late else take_rows(outputs, read)
        if edit is not None and edit.count and edit.at is None:
            positions = torch.arange(outputs.shape[1], device=outputs.device) if read is None else read
            left = torch.where(positions < len(tower.positions), 1.0, _survives(edit, layer, last))
            outputs = outputs * left[..., None].to(outputs.dtype)
        block = tower.blocks[layer - 1]
        assert isinstance(block, Block)
        weight: Tensor = block.attn.o.weight
        change = None if edit is None else edit.layers.get(layer)
        if change is not None and change.added is not None and "attn.o.weight" in change.added:
            weight = weight + change.added["attn.o.weight"]
        weight = weight[:, head * width : (head + 1) * width]  # [D, d]
        added = added + outputs.to(added.dtype) @ weight.to(added.dtype).T
    wide = rows.to(added.dtype)
    spread = (wide.var(dim=-1, keepdim=True, unbiased=False) + tower.ln_post.eps).sqrt()
    rest = wide - added
    return (rest - rest.mean(dim=-1, keepdim=True) + spread).to(rows.dtype)


def _survives(edit: Edit, layer: int, last: int) -> float:
    """How much of what a layer added to extra tokens is still in them behind layer `last`."""
    left = 1.0
    for later in range(layer + 1, last + 1):
        change = edit.layers.get(later)
        if change is not None and change.tokens is not None:
            left *= 1.0 - change.token_weight
    return left


def _rows_of_then(outputs: Tensor, read: Tensor) -> Tensor:
    """Rows `read` of a head's outputs before extra tokens came in: those added nothing."""
    there = read < outputs.shape[1]
    taken = take_rows(outputs, read.clamp(max=outputs.shape[1] - 1))
    return taken * there[..., None].to(taken.dtype)


def norm_without_heads(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """The final norm, of this weight and bias [D], of rows [..., D] that `without_heads` returned."""
    wide = x.to(weight.dtype)
    spread = wide.mean(dim=-1, keepdim=True)
    return ((wide - spread) / spread * weight + bias).to(x.dtype)
