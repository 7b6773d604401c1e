"""A model and a batch for tests of recorded steps."""

from __future__ import annotations

import torch
from tiny import mixed_roles, tiny_clip, token_ids
from torch import Tensor

import dear
from dear.heads.roles import RoleMap
from dear.methods import DeAR


def model(size: str = "tiny", dtype: torch.dtype = torch.float32) -> DeAR:
    if size == "tiny":  # widths of heads that fill no block
        clip, roles = tiny_clip(dtype=torch.float32).to("cuda"), mixed_roles()
    else:
        torch.manual_seed(0)
        clip, roles = dear.Clip(dear.ClipConfig.named("ViT-B-32")).to("cuda"), RoleMap.table2()
    if dtype != torch.float32:
        clip = clip.cast(dtype)
    paper = DeAR.preset("paper").options
    return DeAR(clip, ("red", "green", "blue"), roles=roles, ids=token_ids(), **paper)


def batch(method: DeAR, step: int, count: int = 4) -> tuple[Tensor, Tensor]:
    side = method.clip.config.vision.image_size
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randn(count, 3, side, side, generator=generator)
    return pixels.cuda(), torch.randint(0, 3, (count,), generator=generator).cuda()


def gradients(method: DeAR, pixels: Tensor, labels: Tensor) -> list[Tensor]:
    method.zero_grad()
    method.loss(pixels, labels).total.backward()
    return [p.grad.clone() for p in method.parameters()]
