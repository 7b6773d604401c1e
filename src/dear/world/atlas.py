"""All sprites as one table of quantized distances, built once and looked up by every image.

A cell of the table packs the distances of the four layers (body, accent, light, dark) into one 32-bit word,
one byte each, so that an image needs a single lookup per pixel. Distances are counted in units of 1/256 of a
sprite's half side and cut at half of it, which is more than any outline or edge needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dear.world import factors as F
from dear.world.sprites import sprites

SIDE = 256  # samples along a sprite
REACH = 1.2  # the table covers -REACH..REACH in sprite units
UNIT = 1.0 / 256.0  # one step of a stored distance
LAYERS = ("body", "accent", "light", "dark")


@dataclass(frozen=True)
class Atlas:
    """The sprites of all subjects."""

    words: Tensor  #: int32 [subjects * SIDE * SIDE], four distances per word
    tints: Tensor  #: float [subjects, 3], the accent colors


@lru_cache(maxsize=8)
def atlas(device: str) -> Atlas:
    """The atlas on a device; distances are always computed on the CPU so that all devices draw the same."""
    if device != "cpu":
        base = atlas("cpu")
        return Atlas(base.words.to(device), base.tints.to(device))
    step = 2 * REACH / SIDE
    axis = (torch.arange(SIDE, dtype=torch.float64) + 0.5) * step - REACH
    y, x = -axis.view(-1, 1), axis.view(1, -1)  # rows run downwards
    x, y = x.expand(SIDE, SIDE).contiguous(), y.expand(SIDE, SIDE).contiguous()
    table = torch.empty(len(F.SUBJECT_NAMES), SIDE, SIDE, 4, dtype=torch.uint8)
    tints = torch.empty(len(F.SUBJECT_NAMES), 3)
    for row, sprite in enumerate(sprites()):
        tints[row] = torch.tensor(sprite.tint)
        for layer, name in enumerate(LAYERS):
            part = getattr(sprite, name)
            distance = part(x, y) if part is not None else torch.ones_like(x)
            table[row, :, :, layer] = (distance / UNIT + 128).round().clamp(0, 255).to(torch.uint8)
    return Atlas(table.view(torch.int32).flatten(), tints)
