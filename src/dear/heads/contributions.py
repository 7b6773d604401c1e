"""Decomposition of the image feature into the contributions of heads.

Write z for a head's class-token output [d] (softmax row · V_h), W for its rows of the output projection
[d, D], and s for the standard deviation of the final class token, which `ln_post` divides by. LayerNorm is
linear once s is known, so the head's term of the feature is `(z / s) · M` with `M = center(W) diag(w) P`
[d, E]: a map that depends on the weights alone. One image therefore costs d values per head (64 in
ViT-B/16), from which its contribution [E] follows whenever it is wanted.

With attention pooling (SigLIP, PE-Core), row n of the last layer is divided by s_n; pooling head g weighs it
with p_{g,n} and applies V_g and W_g; then an MLP adds `MLP(norm(o))` to the pooled vector o. With s_n and
p_{g,n} read off the real image, o is linear in the terms: head h adds `sum_g u_{h,g} M_{h,g}`, with
`u_{h,g} = sum_n (p_{g,n} / s_n) z_{h,n}` [d] and `M_{h,g} = center(W_h) diag(w) V_g W_g P` [d, E]. So the
pieces have the same form, with G·d values per head instead of d. What passes the pooling MLP is not linear
and belongs to no head; the share of the feature that the linear path explains is measured per batch and
reported with every result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.clip.correction import Correction
from dear.clip.edit import Record
from dear.clip.model import Clip, ImagesOrPixels, require_clip
from dear.clip.rows import direct_term, spread_of
from dear.clip.tower import Block
from dear.clip.towers import AttentionPool, VisionTower
from dear.errors import UsageError


@dataclass(frozen=True)
class Contributions:
    """Terms of the image feature: `heads.sum((1, 2)) + rest` is `clip.encode_image(batch)`."""

    heads: Tensor  #: [B, L, H, E], one row of heads per layer of `layers`
    rest: Tensor  #: [B, E], everything else: class token, MLPs, biases, heads of other layers
    layers: tuple[int, ...]  #: the L layers, counted from 1
    #: [B], the share of each feature that the linear path explains; None means all of it: the terms are
    #: exact. With attention pooling it is less
    explained: Tensor | None = None
    #: [B, G, E], what each head of the attention pooling adds; None without one
    pool_heads: Tensor | None = None

    def total(self) -> Tensor:
        """The image feature, [B, E]."""
        return self.heads.sum(dim=(1, 2)) + self.rest


@dataclass(frozen=True)
class HeadOutputs:
    """Contributions in their small form: `outputs[b, l, h] @ maps[l, h]` is a head's contribution."""

    outputs: Tensor  #: [B, L, H, d], class-token output of each head divided by the final standard deviation
    features: Tensor  #: [B, E], the image features


def check_layers(clip: Clip, layers: Iterable[int] | None) -> tuple[int, ...]:
    """`layers` sorted, or all layers for None; refused where one does not exist."""
    depth = clip.config.vision.layers
    chosen = tuple(range(1, depth + 1)) if layers is None else tuple(sorted(set(layers)))
    if not chosen or not all(1 <= layer <= depth for layer in chosen):
        raise UsageError(f"layers {list(chosen)} do not all exist: the image tower has layers 1 to {depth}")
    return chosen


def block_of(visual: VisionTower, layer: int) -> Block:
    """A layer, counted from 1."""
    block = visual.blocks[layer - 1]
    assert isinstance(block, Block)
    return block


@torch.no_grad()
def head_maps(clip: Clip, layers: Sequence[int]) -> Tensor:
    """M of each head, [L, H, d, E] in float32: scaled head output to contribution.

    With attention pooling of G heads, d is G times as large.
    """
    visual, heads = clip.visual, clip.config.vision.heads
    pool_maps = None if visual.pool is None else _pool_maps(visual.pool, visual.projection_matrix().float())
    maps = []
    for layer in layers:
        out = block_of(visual, layer).attn.o.weight.float().T  # [D, D]: rows of head h are h·d to (h+1)·d
        if pool_maps is None:
            maps.append(direct_term(visual, out).unflatten(0, (heads, -1)))  # [D, E] -> [H, d, E]
        else:
            normed = (out - out.mean(dim=1, keepdim=True)) * visual.ln_post.weight.float()
            # normed [D, D] -> [H, d, D]; by_pool_head [H, G, d, E]
            by_pool_head = torch.einsum("hdw,gwe->hgde", normed.unflatten(0, (heads, -1)), pool_maps)
            maps.append(by_pool_head.flatten(1, 2))  # [H, G·d, E]
    return torch.stack(maps)


def _pool_maps(pool: AttentionPool, project: Tensor) -> Tensor:
    """From a normed row to what each pooling head adds to the feature, [G, D, E]: V_g W_g P."""
    attn = pool.attn
    value = attn.v.weight.float().unflatten(0, (attn.heads, -1))  # [G, d_g, D]
    out = attn.o.weight.float().T.unflatten(0, (attn.heads, -1))  # [G, d_g, D]
    return torch.einsum("gkw,gkv->gwv", value, out) @ project


@torch.no_grad()
def head_outputs(clip: Clip, batch: Tensor, layers: Sequence[int]) -> HeadOutputs:
    """Scaled class-token outputs of the heads of `layers`, for images [B, 3, S, S]."""
    clip = clip.plain  # contributions are those of the plain backbone
    visual = clip.visual
    if visual.pool is not None:
        run = _PooledRun(clip, visual.pool, batch, layers)
        return HeadOutputs(run.outputs, run.features)
    x = visual.embed(batch.to(clip.device))
    if layers[0] > 1:
        x = visual.run(x, last=layers[0] - 1)
    record = Record()
    rows = visual.final_rows(x, layers[0], read=_class_row(clip), record=record)  # [B, 1, D]
    spread = _spread(clip, rows.x[:, 0])  # [B, 1]
    outputs = _recorded_outputs(record, layers) / spread[:, None, None]
    return HeadOutputs(outputs, visual.project(rows)[:, 0].float())


@torch.no_grad()
def decompose(clip: Clip, images: ImagesOrPixels, layers: Iterable[int] | None = None) -> Contributions:
    """Split the image feature into what each head adds and the rest.

    Args:
        clip: the backbone.
        images: normalized pixels [B, 3, S, S], or images: paths, Pillow images, arrays.
        layers: which layers' heads to show; None for all.

    Returns:
        Contributions whose terms sum to `clip.encode_image(images)`, under the backbone's correction if it
        has one; with attention pooling `rest` contains what passed the pooling MLP, and `explained` is the
        share that did not.

    Raises:
        UsageError: a layer does not exist.
        InputError: the images do not have the backbone's size.

    >>> from dear.clip.config import ClipConfig
    >>> clip = Clip(ClipConfig.named("ViT-B-32"))
    >>> parts = decompose(clip, torch.zeros(1, 3, 224, 224), layers=[11, 12])
    >>> parts.heads.shape, parts.rest.shape
    (torch.Size([1, 2, 12, 512]), torch.Size([1, 512]))
    """
    chosen = check_layers(require_clip(clip), layers)
    batch = clip.pixels(images)
    if clip.correction is not None:
        return _corrected(clip, batch, chosen, clip.correction)
    visual = clip.visual
    if visual.pool is not None:
        run = _PooledRun(clip, visual.pool, batch, chosen)
        heads = torch.einsum("blhd,lhde->blhe", run.outputs, head_maps(clip, chosen))
        return Contributions(
            heads, run.features - heads.sum(dim=(1, 2)), chosen, run.explained, run.pool_heads
        )
    record = Record()
    start = visual.embed(batch)
    last = visual.run(start, read=_class_row(clip), record=record)[:, 0]  # [B, D]
    spread = _spread(clip, last)
    rest = start[:, 0].float()
    for layer in range(1, clip.config.vision.layers + 1):
        project = block_of(visual, layer).attn.o
        rest = rest + record[f"blocks.{layer}.mlp"][:, 0].float() + project.bias.float()
        if layer not in chosen:
            # [B, 1, H, d] -> [B, D]
            rest = rest + _recorded_outputs(record, [layer]).flatten(1) @ project.weight.float().T
    outputs = _recorded_outputs(record, chosen) / spread[:, None, None]
    heads = torch.einsum("blhd,lhde->blhe", outputs, head_maps(clip, chosen))
    rest = (
        direct_term(visual, rest, spread) + visual.ln_post.bias.float() @ visual.projection_matrix().float()
    )
    if visual.proj_bias is not None:
        rest = rest + visual.proj_bias.float()
    return Contributions(heads, rest, chosen)


def _corrected(clip: Clip, batch: Tensor, layers: tuple[int, ...], correction: Correction) -> Contributions:
    """The plain terms, those of removed heads 0, under the correction's map; its bias is part of the rest."""
    removed = {layer for layer, _ in correction.heads}
    plain = decompose(clip.plain, batch, removed | set(layers))
    present = torch.ones(plain.heads.shape[1:3], device=plain.heads.device)
    for layer, head in correction.heads:
        present[plain.layers.index(layer), head] = 0
    matrix, bias = correction.matrix.to(plain.heads), correction.bias.to(plain.heads)
    heads = plain.heads * present[..., None] @ matrix
    shown = [layer in layers for layer in plain.layers]
    hidden = heads[:, [not is_shown for is_shown in shown]].sum(dim=(1, 2))
    rest = plain.rest @ matrix + bias + hidden
    pool_heads = None if plain.pool_heads is None else plain.pool_heads @ matrix
    return Contributions(heads[:, shown], rest, layers, plain.explained, pool_heads)


def explained_share(clip: Clip, batch: Tensor) -> float | None:
    """Mean share of the features that the linear path explains; None where the split is exact."""
    if clip.visual.pool is None:
        return None
    return float(_PooledRun(clip, clip.visual.pool, batch, (1,)).explained.mean())


class _PooledRun:
    """A run through a tower with attention pooling that keeps what `head_maps` is multiplied with."""

    @torch.no_grad()
    def __init__(self, clip: Clip, pool: AttentionPool, batch: Tensor, layers: Sequence[int]) -> None:
        visual = clip.visual
        record = Record(slice(None))
        x = visual.run(visual.embed(batch.to(clip.device)), record=record)  # [B, N, D]
        z, pattern = pool.read(visual.ln_post(x), fused=False)  # [B, G, 1, d_g], [B, G, 1, N]
        assert pattern is not None
        pooled = pool.attn.merge(z)[:, 0]  # [B, D]
        spread = _spread(clip, x)[..., 0]  # [B, N]
        weight = pattern[:, :, 0].float() / spread[:, None]  # [B, G, N]
        outputs = [
            # [B, H, G, d] -> [B, H, G*d]
            torch.einsum("bgn,bhnd->bhgd", weight, record[f"blocks.{layer}.attn.heads"].float()).flatten(2)
            for layer in layers
        ]
        out = pool.attn.o.weight.float().T.unflatten(0, (pool.attn.heads, -1))  # [G, d_g, D]
        self.outputs = torch.stack(outputs, dim=1)  #: [B, L, H, G·d]
        self.features = visual.project_pooled(pool.finish(pooled)).float()  #: [B, E]
        #: [B], `linear · feature / |feature|^2`: the share of each feature that bypassed the pooling MLP
        linear = visual.project_pooled(pooled).float()
        self.explained = (linear * self.features).sum(-1) / self.features.square().sum(-1)
        #: [B, G, E], what each pooling head adds, without its bias
        added = torch.einsum("bgk,gkw->bgw", z[:, :, 0].float(), out)
        self.pool_heads = added @ visual.projection_matrix().float()


def _recorded_outputs(record: Record, layers: Sequence[int]) -> Tensor:
    """The heads' class-token outputs, [B, L, H, d]."""
    return torch.stack([record[f"blocks.{layer}.attn.heads"][:, :, 0].float() for layer in layers], dim=1)


def _spread(clip: Clip, rows: Tensor) -> Tensor:
    """What `ln_post` divides rows [..., D] by, [..., 1]."""
    return spread_of(rows.float(), clip.visual.ln_post.eps)


def _class_row(clip: Clip) -> Tensor:
    return torch.zeros(1, dtype=torch.long, device=clip.device)
