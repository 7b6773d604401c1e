"""The rows of the last layer that a score is read from, as sums of what each head and each MLP added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.clip.edit import Edit, LayerEdit
from dear.clip.tower import Block, added_weights
from dear.clip.towers import VisionTower
from dear.heads.contributions import block_of
from dear.tasks.explain.tracing import Segment


@dataclass(frozen=True)
class Terms:
    """The terms of one row of the last layer, for B images: their sum is the row."""

    start: Tensor  #: [B, D], where the row started; of extra tokens: everything learned that was put in
    heads: Tensor  #: [B, L, H, d], each head's output before the output projection, gated
    mlps: Tensor  #: [B, L, D]
    biases: Tensor  #: [D], of the output projections
    weights: Tensor  #: [L], how much of what a layer added is still there at the end (1 but for extra tokens)
    changes: tuple[LayerEdit | None, ...]  #: of each layer, as the row passed it


def row_terms(
    visual: VisionTower, segments: Sequence[Segment], final: Segment
) -> dict[int, tuple[int, Terms]]:
    """Row number (0: class token, 1 + t: extra token t) -> place in the leaf, and its terms."""
    edit, length, terms = final.edit, len(visual.positions), {}
    for place, position in enumerate(final.positions):
        extra = edit is not None and edit.count and edit.at is None and position >= length
        if position == 0 or extra:  # no method reads a patch's row behind the last layer
            row = 1 + position - length if extra else 0
            terms[row] = (place, _terms_of(visual, segments, final, position, row))
    return terms


def _terms_of(
    visual: VisionTower, segments: Sequence[Segment], final: Segment, position: int, row: int
) -> Terms:
    """Walk back from the last layer to where the row started."""
    vision = visual.config
    heads, mlps = {}, {}
    changes: list[LayerEdit | None] = [None] * vision.layers
    weights = torch.zeros(vision.layers, dtype=torch.float64)
    biases = torch.zeros(vision.width, dtype=torch.float64)
    start = torch.zeros(len(final.x), vision.width, dtype=torch.float64)
    ablated = set(visual.removed_heads)
    weight, segment, layer = 1.0, final, final.last
    while True:
        change = changes[layer - 1] = change_of(segment.edit, layer)
        z = segment.record[f"blocks.{layer}.attn.heads"][:, :, position].double().cpu()  # [B, H, d]
        for ablated_layer, head in ablated:
            if ablated_layer == layer:
                z[:, head] = 0
        heads[layer], mlps[layer] = z, segment.record[f"blocks.{layer}.mlp"][:, position].double().cpu()
        weights[layer - 1] = weight
        biases += weight * output_of(block_of(visual, layer), change)[1]
        if row > 0 and segment.edit is not None:  # what was put in at this layer
            fresh, remaining = _inserted_token(segment.edit, layer, row - 1)
            if fresh is not None:
                start += weight * (1 - remaining) * fresh
            weight *= remaining
            if layer == segment.edit.first or weight == 0:
                break
        layer -= 1
        if layer < segment.first:
            before = run_before(segments, segment, position)
            if before is None:
                start += weight * segment.x[:, position].double().cpu()
                break
            segment = before
    zeros = torch.zeros(len(start), vision.heads, vision.head_width, dtype=torch.float64)
    flat = torch.zeros_like(start)
    layers = range(1, vision.layers + 1)
    return Terms(
        start,
        torch.stack([heads.get(layer, zeros) for layer in layers], dim=1),
        torch.stack([mlps.get(layer, flat) for layer in layers], dim=1),
        biases,
        weights,
        tuple(changes),
    )


def run_before(segments: Sequence[Segment], segment: Segment, position: int) -> Segment | None:
    """The run that made this run's input, found by the class token it left."""
    if position >= segment.x.shape[1]:  # an extra token that came in later
        return None
    for other in reversed(segments):
        if other.last == segment.first - 1 and other.first <= other.last and position in other.positions:
            place = other.positions.index(position)
            if other is not segment and torch.equal(other.out[:, place], segment.x[:, position]):
                return other
    return None


def change_of(edit: Edit | None, layer: int) -> LayerEdit | None:
    """What an edit changes in a layer."""
    return None if edit is None else edit.layers.get(layer)


def added_to(block: Block, change: LayerEdit | None) -> dict[str, Tensor]:
    """The weights of a layer that a change adds to, with the additions."""
    return {} if change is None or not change.added else added_weights(block, change.added)


def output_of(block: Block, change: LayerEdit | None) -> tuple[Tensor, Tensor]:
    """Weight [D, D] and bias [D] of a layer's output projection, in float64 on the CPU."""
    added = added_to(block, change)
    weight = added.get("attn.o.weight", block.attn.o.weight)
    bias = added.get("attn.o.bias", block.attn.o.bias)
    return weight.detach().double().cpu(), bias.detach().double().cpu()


def _inserted_token(edit: Edit, layer: int, token: int) -> tuple[Tensor | None, float]:
    """What a layer puts in for an extra token, [1 or B, D], and how much of the token's past is kept."""
    change = edit.layers.get(layer)
    if change is None or change.tokens is None:
        return None, 1.0
    fresh = change.tokens[..., token, :].detach().double().cpu()
    return fresh, 0.0 if layer == edit.first else 1.0 - change.token_weight
