"""The architecture of a bare state dict, inferred from its tensors: OpenAI's CLIP and Meta's PE-Core."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dear.clip.config import CLIP_MEAN, CLIP_STD, HALF, ClipConfig
from dear.clip.config_fields import build_config
from dear.errors import CheckpointError

_PERCEPTION = {"rotary": True, "pool": "attention", "pool_heads": 8}
_PERCEPTION_IMAGES = {
    "mean": HALF,
    "std": HALF,
    "resize": "squash",
    "interpolation": "bilinear",
}


def from_shapes(tensors: Mapping[str, Tensor], activation: str, source: str) -> ClipConfig:
    """The architecture of OpenAI's or PE-Core's state dict; heads of both are 64 wide."""

    def shape(name: str, rank: int) -> tuple[int, ...]:
        if name not in tensors:
            raise CheckpointError(f"{source}: the tensors do not fit this CLIP: missing {name}")
        if tensors[name].dim() != rank:
            raise CheckpointError(
                f"{source}: {name} must have {rank} axes, got the shape {list(tensors[name].shape)}"
            )
        return tuple(tensors[name].shape)

    def tower(prefix: str, width: int) -> dict[str, Any]:
        start = f"{prefix}transformer.resblocks."
        indices = {name[len(start) :].split(".")[0] for name in tensors if name.startswith(start)}
        if width % 64:
            raise CheckpointError(
                f"{source}: the width must be a multiple of 64, a head's width, got {width}"
            )
        mlp = shape(f"{start}0.mlp.c_fc.weight", 2)[0]
        return {
            "width": width,
            "layers": len(indices),
            "heads": width // 64,
            "mlp": mlp,
            "activation": activation,
        }

    width, _, patch, _ = shape("visual.conv1.weight", 4)
    positions = shape("visual.positional_embedding", 2)[0]
    side = math.isqrt(max(positions - 1, 0))
    vocab, text_width = shape("token_embedding.weight", 2)
    perception = "visual.attn_pool.probe" in tensors
    return build_config(
        source,
        vision={
            **tower("visual.", width),
            "image_size": side * patch,
            "patch_size": patch,
            **(_PERCEPTION if perception else {}),
        },
        text={**tower("", text_width), "context": shape("positional_embedding", 2)[0], "vocab": vocab},
        embed_dim=shape("visual.proj", 2)[1],
        images=_PERCEPTION_IMAGES if perception else {"mean": CLIP_MEAN, "std": CLIP_STD},
    )
