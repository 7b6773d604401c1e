"""Small towers and their inputs."""

from __future__ import annotations

import torch

from dear.clip import BlockMask, Clip, ClipConfig, TextConfig, VisionConfig

EOT, BOT = 49_407, 49_406


def small_clip(activation: str = "quick_gelu", seed: int = 0) -> Clip:
    """Odd sizes on purpose: 5 heads, 7 layers. Biases are made non-zero so that forgetting one shows."""
    torch.manual_seed(seed)
    config = ClipConfig(
        VisionConfig(width=40, layers=7, heads=5, activation=activation, image_size=24, patch_size=8),
        TextConfig(width=24, layers=3, heads=3, activation=activation),
        embed_dim=18,
    )
    clip = Clip(config).double()
    with torch.no_grad():
        for name, tensor in clip.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(std=0.3)
            if "ln_" in name and name.endswith("weight"):
                tensor.normal_(1.0, 0.2)
    return clip


def texts() -> torch.Tensor:
    ids = torch.zeros(3, 77, dtype=torch.long)
    for row, length in enumerate((2, 5, 3)):
        ids[row, 0] = BOT
        ids[row, 1 : 1 + length] = torch.arange(300, 300 + length) * (row + 1)
        ids[row, 1 + length] = EOT
    return ids


def block_mask(open_heads: tuple[int, ...] = ()) -> BlockMask:
    see = torch.zeros(5, 3, 3, dtype=torch.bool)
    see[:, 0, 0] = True
    see[:, 1:, 1:] = True
    for head in open_heads:
        see[head] = True
    return BlockMask(see)
