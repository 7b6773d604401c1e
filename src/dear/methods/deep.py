"""Deep visual prompts: tokens after the patches, replaced at every layer up to a depth."""

from __future__ import annotations

from torch import Tensor

from dear.clip.edit import Edit, LayerEdit
from dear.clip.model import Clip
from dear.errors import UsageError


def depth_of(depth: int | None, layers: int, share: float = 0.75, option: str = "depth") -> int:
    """Number of layers with learned tokens: `depth`, or a share of the layers.

    >>> depth_of(None, 12), depth_of(None, 6), depth_of(3, 12)
    (9, 4, 3)
    """
    depth = max(1, round(share * layers)) if depth is None else depth
    if not 1 <= depth <= layers:
        raise UsageError(f"{option} must be from 1 to {layers}, the layers of the tower, got {depth}")
    return depth


def prompted_images(clip: Clip, embedded: Tensor, tokens: Tensor) -> Tensor:
    """Image features [B, E] of embedded patches [B, N, D] with tokens [layers, T, D] at layers 1, 2, ...

    The first layer's tokens pass the norm before the blocks, as the patches do; the last ones flow on.
    """
    layers = {1: LayerEdit(tokens=clip.visual.norm_input(tokens[0]))}
    layers |= {layer: LayerEdit(tokens=part) for layer, part in enumerate(tokens[1:], start=2)}
    return clip.visual.features_from(embedded, edit=Edit(layers, count=tokens.shape[-2]))
