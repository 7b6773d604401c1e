"""Tools for single attention heads of any CLIP: low-rank changes, gates and masks as edits.

Every tool returns an `Edit` of a tower; `combine` merges several, `clip.visual(pixels, edit=...)` applies
them, `fold` returns a plain CLIP with low-rank changes and gates folded into its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from dear.clip.config import Head, TowerConfig
from dear.clip.edit import Edit, LayerEdit, LowRank
from dear.clip.model import Clip
from dear.clip.tower import Tower
from dear.errors import UsageError
from dear.methods.tensors import uniform


class HeadLoRA(nn.Module):
    """LoRA on chosen heads: `dW_h = scale * B_h A_h` for q, k or v of each, with B initialized to 0.

    Args:
        config: the tower's, `clip.config.vision` or `clip.config.text`.
        heads: (layer, head) pairs.
        rank: rank of each change.
        on: projections to change, of q, k and v.
        scale: factor of the change.
        seed: random seed for the initial values of A.

    Example:
        >>> import dear
        >>> clip = dear.Clip(dear.ClipConfig.named("ViT-B-32"))
        >>> lora = HeadLoRA(clip.config.vision, [(12, 7), (11, 3)], rank=4)
        >>> sum(p.numel() for p in lora.parameters())  # 2 heads, q and v, rank 4, 768 in and 64 out
        13312
        >>> clip.visual(torch.zeros(1, 3, 224, 224), edit=lora.edit()).shape
        torch.Size([1, 512])
    """

    def __init__(
        self,
        config: TowerConfig,
        heads: Iterable[Head],
        rank: int = 4,
        on: tuple[str, ...] = ("q", "v"),
        scale: float = 1.0,
        seed: int = 1,
    ) -> None:
        super().__init__()
        if rank < 1 or not on or not set(on) <= {"q", "k", "v"}:
            raise UsageError(
                f"rank must be at least 1 and `on` a tuple of q, k and v, got rank {rank} and on {on!r}"
            )
        self.config, self.heads, self.on, self.scale = config, config.check_heads(heads), on, scale
        count, generator = len(self.heads), torch.Generator().manual_seed(seed)
        down = uniform(generator, len(on), count, rank, config.width, inputs=config.width)
        self.down = nn.Parameter(down.float())  # [P, n, r, D]
        self.up = nn.Parameter(torch.zeros(len(on), count, config.head_width, rank))  # [P, n, d, r]

    def edit(self) -> Edit:
        """The changes as an edit; only the matrices of the chosen heads receive gradients."""
        layers: dict[int, dict[str, Any]] = {}
        for layer in dict.fromkeys(layer for layer, _ in self.heads):
            rows = [row for row, (number, _) in enumerate(self.heads) if number == layer]  # n of this layer
            heads = torch.tensor([self.heads[row][1] for row in rows], device=self.up.device)  # [n]
            for p, name in enumerate(self.on):
                down = self.down.new_zeros(self.config.heads, *self.down.shape[2:])  # [H, r, D]
                up = self.up.new_zeros(self.config.heads, *self.up.shape[2:])  # [H, d, r]
                pair = LowRank(
                    down.index_copy(0, heads, self.down[p, rows]),
                    up.index_copy(0, heads, self.up[p, rows]),
                    self.scale,
                )
                layers.setdefault(layer, {})[name] = pair
        return Edit({layer: LayerEdit(**changes) for layer, changes in layers.items()})


def head_gates(config: TowerConfig, gates: Mapping[Head, float | Tensor]) -> Edit:
    """Multiply the outputs of chosen heads: 0 disables a head, 1 does not change it; differentiable.

    >>> edit = head_gates(TowerConfig(width=8, layers=2, heads=4), {(2, 1): 0.0})
    >>> edit.layers[2].gate
    tensor([1., 0., 1., 1.])
    """
    layers: dict[int, list[Tensor]] = {}
    device = next((gate.device for gate in gates.values() if isinstance(gate, Tensor)), torch.device("cpu"))
    for layer, head in config.check_heads(gates):
        row = layers.setdefault(layer, [torch.ones((), device=device) for _ in range(config.heads)])
        row[head] = torch.as_tensor(gates[layer, head], dtype=torch.get_default_dtype(), device=device)
    return Edit({layer: LayerEdit(gate=torch.stack(row)) for layer, row in layers.items()})


def head_masks(config: TowerConfig, hidden: Mapping[Head, Tensor]) -> Edit:
    """Hide keys from queries in chosen heads.

    Args:
        config: the tower's.
        hidden: for (layer, head): bool [N, N], true where query i (row) may not attend to key j (column).
    """
    layers: dict[int, Tensor] = {}
    for layer, head in config.check_heads(hidden):
        pairs = hidden[layer, head]  # bool [N, N]
        if pairs.ndim != 2 or pairs.dtype != torch.bool or bool(pairs.all(dim=1).any()):
            raise UsageError(
                f"the mask of head {head} in layer {layer} must be bool [N, N] with no row all true, got "
                f"{str(pairs.dtype).removeprefix('torch.')} {list(pairs.shape)}"
            )
        full = layers.setdefault(layer, torch.zeros(config.heads, *pairs.shape, device=pairs.device))
        if full.shape[1:] != pairs.shape:
            raise UsageError(
                f"all masks of layer {layer} must have the same size, got {list(full.shape[1:])} and "
                f"{list(pairs.shape)}"
            )
        full[head].masked_fill_(pairs.to(full.device), float("-inf"))
    return Edit({layer: LayerEdit(mask=mask) for layer, mask in layers.items()})


def combine(*edits: Edit) -> Edit:
    """One edit with the changes of several; no two may change the same part of a layer."""
    with_tokens = [edit for edit in edits if edit.count]
    if len(with_tokens) > 1:
        raise UsageError(f"at most one of the edits may insert tokens, got {len(with_tokens)}")
    layers: dict[int, LayerEdit] = {}
    for edit in edits:
        for layer, change in edit.layers.items():
            existing = layers.get(layer, LayerEdit())
            new = {
                f.name: getattr(change, f.name)
                for f in fields(change)
                if f.name != "token_weight" and getattr(change, f.name) is not None
            }
            twice = [name for name in new if getattr(existing, name) is not None]
            if twice:
                raise UsageError(f"at most one edit may change {twice[0]} in layer {layer}, got two")
            if "tokens" in new:
                new["token_weight"] = change.token_weight
            layers[layer] = replace(existing, **new)
    return Edit(layers, count=sum(e.count for e in edits), at=with_tokens[0].at if with_tokens else None)


@torch.no_grad()
def fold(clip: Clip, visual: Edit | None = None, text: Edit | None = None) -> Clip:
    """A plain CLIP with low-rank and additive changes folded into its weights, gates into its projections.

    A correction of the image feature is folded as well.
    """
    plain = clip.copy()
    for tower, edit in ((plain.visual, visual), (plain.text, text)):
        for layer, change in (edit.layers if edit is not None else {}).items():
            _fold_layer(tower, layer, change)
    return plain if plain.correction is None else plain.fold_correction()


def _fold_layer(tower: Tower, layer: int, change: LayerEdit) -> None:
    """Fold one layer's change into its weights."""
    if change.tokens is not None or change.mask is not None:
        raise UsageError(
            f"the edit of layer {layer} must not have tokens or masks, which cannot be folded into weights; "
            "remove them first"
        )
    block = tower.blocks[layer - 1]
    for name, addition in (change.added or {}).items():
        block.get_parameter(name).add_(addition.to(block.get_parameter(name)))
    for name in ("q", "k", "v"):
        pair: LowRank | None = getattr(change, name)
        if pair is not None:
            weight = block.get_parameter(f"attn.{name}.weight")
            weight.add_(pair.matrix().to(weight))
    if change.gate is not None:
        weight = block.get_parameter("attn.o.weight")
        weight.mul_(change.gate.repeat_interleave(tower.config.head_width).to(weight))  # [H] -> [D] columns
