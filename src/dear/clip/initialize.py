"""Random weights at CLIP's scales."""

from __future__ import annotations

import torch
from torch import nn

from dear.clip.attention import Attention, Linear
from dear.clip.text import TextTower
from dear.clip.tower import MLP, Block, Tower
from dear.clip.vision import VisionTower


@torch.no_grad()
def initialize(visual: VisionTower, text: TextTower) -> None:
    """Fill both towers: small at the residual stream, smaller the deeper the tower; biases 0."""
    for tower in (visual, text):
        for block in tower.blocks:
            assert isinstance(block, Block)
            _layer(tower, block.attn, block.mlp)
        if tower.proj is not None:
            nn.init.normal_(tower.proj, std=tower.config.width**-0.5)
        if tower.proj_bias is not None:
            nn.init.zeros_(tower.proj_bias)
    _image_ends(visual)
    nn.init.normal_(text.tokens, std=0.02)
    nn.init.normal_(text.positions, std=0.01)


def _layer(tower: Tower, attn: Attention, mlp: MLP) -> None:
    width, depth = tower.config.width, tower.config.layers
    narrow = width**-0.5
    deep = narrow * (2 * depth) ** -0.5
    scales: dict[Linear, float] = {attn.q: narrow, attn.k: narrow, attn.v: narrow, attn.o: deep}
    scales |= {mlp.up: (2 * width) ** -0.5, mlp.down: deep}
    for linear, scale in scales.items():
        nn.init.normal_(linear.weight, std=scale)
        nn.init.zeros_(linear.bias)


def _image_ends(visual: VisionTower) -> None:
    """Everything of the image tower but its layers and its projection."""
    narrow = visual.config.width**-0.5
    nn.init.normal_(visual.patch.weight, std=(3 * visual.shape.patch_size**2) ** -0.5)
    if visual.patch.bias is not None:
        nn.init.zeros_(visual.patch.bias)
    if visual.class_token is not None:
        nn.init.normal_(visual.class_token, std=narrow)
    nn.init.normal_(visual.positions, std=narrow)
    if visual.pool is not None:
        nn.init.normal_(visual.pool.probe)
        _layer(visual, visual.pool.attn, visual.pool.mlp)
