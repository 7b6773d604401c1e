"""The images that activate a head most and least, and the attention maps of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.clip.edit import Record
from dear.clip.model import Clip
from dear.errors import UsageError
from dear.heads.collect import HeadContributions
from dear.heads.contributions import block_of, head_maps
from dear.heads.names import Head


@dataclass(frozen=True)
class ActivatingImages:
    """Images ordered by the projection of a head's contribution on a direction."""

    scores: Tensor  #: [n], projection of the head's contribution, minus the mean over the images
    most: tuple[int, ...]  #: numbers of the images with the highest scores, highest first
    least: tuple[int, ...]  #: numbers of those with the lowest, lowest first
    phrase: str | None  #: the phrase whose direction it is; None: the head's principal direction


def activating_images(
    images: HeadContributions, key: Head, text: Tensor | None = None, phrase: str | None = None, top: int = 4
) -> ActivatingImages:
    """Find the `top` collected images that activate a head most and least.

    `text` [E] is the feature of a `phrase` and the direction; None: the direction in which the head's
    contributions vary most.
    """
    terms = images.contribution([key])  # [n, E]
    terms = terms - terms.mean(dim=0)
    if text is None:
        direction = torch.linalg.svd(terms, full_matrices=False)[2][0]
        direction = direction * direction.sum().sign()  # the sign of a singular vector is arbitrary
    else:
        direction = torch.nn.functional.normalize(text.float(), dim=-1)
    scores = terms @ direction
    order = scores.argsort(descending=True, stable=True).tolist()
    top = min(top, len(order) // 2)
    return ActivatingImages(
        scores, tuple(order[:top]), tuple(order[::-1][:top]), phrase if text is not None else None
    )


@torch.no_grad()
def attention_maps(clip: Clip, pixels: Tensor, keys: Sequence[Head]) -> Tensor:
    """Attention maps of heads: the norm of what each patch adds to the head's contribution.

    A head's class-token output is a sum over tokens of (attention weight) · (value); carried to the feature,
    each patch's summand is a vector whose length measures how much of the contribution comes from there.

    For normalized images [B, 3, S, S] and K heads: [K, B, side, side], not normalized; without the
    class token's summand.
    """
    if clip.visual.pool is not None:
        raise UsageError(
            f"{clip.name} pools its tokens by attention: it has no class token whose attention could be shown"
        )
    clip = clip.plain  # what heads do in the plain backbone
    visual, side = clip.visual, clip.config.vision.side
    layers = sorted({layer for layer, _ in keys})
    maps = dict(zip(layers, head_maps(clip, layers), strict=True))  # [H, d, E] each
    x = visual.embed(pixels.to(clip.device))
    attention: dict[Head, Tensor] = {}
    done = 0
    for layer in layers:
        x = visual.run(x, first=done + 1, last=layer - 1)
        record = Record(pattern=True)
        block = block_of(visual, layer)
        values = block.attn.split(block.attn.v(block.ln_1(x))).float()  # [B, H, N, d]
        x = visual.run(x, first=layer, last=layer, record=record)
        weights = record[f"blocks.{layer}.attn.pattern"][:, :, 0, :].float()  # [B, H, N]
        done = layer
        for head in {head for head_layer, head in keys if head_layer == layer}:
            lengths = (values[:, head] @ maps[layer][head]).norm(dim=-1)  # [B, N]
            # without the class token [B, side*side] -> [B, side, side]
            attention[layer, head] = (weights[:, head] * lengths)[:, 1:].unflatten(1, (side, side))
    return torch.stack([attention[key] for key in keys])
