"""Tiny models of the families other than CLIP."""

from __future__ import annotations

import torch
from torch import Tensor

from dear.clip import Clip, ClipConfig, TextConfig, VisionConfig

NAMES = ("red cat", "dog", "very old newt")


SIGLIP = ClipConfig(
    VisionConfig(
        width=36, layers=6, heads=4, activation="gelu_tanh", eps=1e-6, image_size=26, patch_size=8,
        class_token=False, patch_bias=True, pre_norm=False, pool="attention", projection=False,
    ),
    TextConfig(
        width=24, layers=5, heads=3, activation="gelu_tanh", context=64, vocab=40, causal=False,
        pool="last", end=1, begins=False, clean="canonicalize", projection_bias=True,
    ),
    embed_dim=36, resize="squash", logit_bias=True,
)  # fmt: skip


PERCEPTION = ClipConfig(
    VisionConfig(
        width=32, layers=6, heads=4, activation="gelu", image_size=24, patch_size=8, rotary=True,
        pool="attention", pool_heads=2,
    ),
    TextConfig(width=24, layers=5, heads=3, activation="gelu", context=32),
    embed_dim=20, resize="squash", interpolation="bilinear",
)  # fmt: skip


class Letters:
    """A tokenizer in three lines: a token per letter, 1 ends and pads."""

    def __call__(self, texts, context: int) -> Tensor:
        rows = [[2 + ord(c) % 38 for c in text][: context - 1] for text in texts]
        return torch.tensor([row + [1] * (context - len(row)) for row in rows])


def model(config: ClipConfig, dtype: torch.dtype = torch.float64) -> Clip:
    torch.manual_seed(0)
    clip = Clip(config, name="tiny")
    with torch.no_grad():
        for name, tensor in clip.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(std=0.2)
    if config is SIGLIP:
        clip.tokenizer = Letters()
    return clip.to(dtype)


FAMILIES = {"siglip": SIGLIP, "perception": PERCEPTION}
