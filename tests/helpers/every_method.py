"""Every method on a tiny backbone."""

from __future__ import annotations

import torch
from tiny import SMALL, Colors, images, mixed_roles, tiny_clip

from dear.clip import Clip
from dear.methods import Method, build_method

TASK = Colors(domains=2)
NAMES = TASK.classes
NOVEL = ("crimson apple", "tall tree", "sea", "lamp")


def build(name: str, clip: Clip | None = None, **options: object) -> Method:
    clip = tiny_clip(dtype=torch.float32) if clip is None else clip
    return build_method(name, clip, NAMES, roles=mixed_roles(), **{**SMALL.get(name, {}), **options})


def pixels(count: int = 3) -> torch.Tensor:
    return images(count, seed=1, dtype=torch.float32)
