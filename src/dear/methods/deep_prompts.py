"""Deep visual prompts: learned tokens after the patches, replaced by new ones at each layer up to a depth."""

from __future__ import annotations

from torch import Tensor

from dear.clip.edit import Edit, LayerEdit
from dear.clip.model import Clip
from dear.errors import UsageError


def resolve_depth(depth: int | None, layers: int, share: float = 0.75, option: str = "depth") -> int:
    """Number of layers with learned tokens: `depth` if it is valid, or by default a share of the layers.

    >>> resolve_depth(None, 12), resolve_depth(None, 6), resolve_depth(3, 12)
    (9, 4, 3)
    """
    depth = max(1, round(share * layers)) if depth is None else depth
    if not 1 <= depth <= layers:
        raise UsageError(f"{option} must be from 1 to {layers}, the layers of the tower, got {depth}")
    return depth


def encode_with_prompts(clip: Clip, embedded: Tensor, tokens: Tensor) -> Tensor:
    """Image features [B, E] of embedded patches [B, N, D] with tokens [layers, T, D] at layers 1, 2, ...

    The tokens of layer 1 are normalized like the patches; after the last prompted layer, tokens are not
    replaced.
    """
    layers = {1: LayerEdit(tokens=clip.visual.norm_input(tokens[0]))}
    layers |= {layer: LayerEdit(tokens=part) for layer, part in enumerate(tokens[1:], start=2)}
    return clip.visual.features_from(embedded, edit=Edit(layers, count=tokens.shape[-2]))
