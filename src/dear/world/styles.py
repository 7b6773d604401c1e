"""The styles: what is done to a finished image [b, 3, side, side] in 0..1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from dear.world.exact import noise
from dear.world.scenes import Scenes


def luminance(pixels: Tensor) -> Tensor:
    """float32 [b, side, side]."""
    return pixels[:, 0] * 0.30 + pixels[:, 1] * 0.59 + pixels[:, 2] * 0.11


def blur(pixels: Tensor, reach: int) -> Tensor:
    """A box blur of `2 * reach + 1` pixels each way, edges repeated; terms are added in a fixed order."""
    for axis in (-1, -2):
        side = pixels.shape[axis]
        pad = (reach, reach, 0, 0) if axis == -1 else (0, 0, reach, reach)
        wide = functional.pad(pixels, pad, mode="replicate")
        total = wide.narrow(axis, 0, side).clone()
        for step in range(1, 2 * reach + 1):
            total += wide.narrow(axis, step, side)
        pixels = total / (2 * reach + 1)
    return pixels


def shift_pixels(pixels: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Images whose pixels come from `right` and `down` pixels away (rounded, broadcast to [b, side, side]).

    Beyond the border, its pixels are repeated.
    """
    side = pixels.shape[-1]
    axis = torch.arange(side, device=pixels.device)
    columns = (axis.view(1, 1, -1) + right.round().long()).clamp(0, side - 1)
    rows = (axis.view(1, -1, 1) + down.round().long()).clamp(0, side - 1)
    index = (rows * side + columns).flatten(1).unsqueeze(1)
    return pixels.flatten(2).gather(2, index.expand(len(pixels), 3, -1)).view_as(pixels)


def _slopes(channel: Tensor) -> Tensor:
    """How much a channel [b, k, side, side] changes to the right and downwards, together."""
    wide = functional.pad(channel, (0, 1, 0, 1), mode="replicate")
    across = (wide[..., :-1, 1:] - channel).abs()
    return across + (wide[..., 1:, :-1] - channel).abs()


def _grain(scenes: Scenes, side: int, kind: int = 0) -> Tensor:
    return noise(kind, scenes.variation("style_0"), scenes.variation("style_1"), side)


def _vignette(pixels: Tensor, amount: float) -> Tensor:
    side = pixels.shape[-1]
    axis = (torch.arange(side, device=pixels.device, dtype=torch.float32) + 0.5) / side - 0.5
    square = axis * axis
    return pixels * (1.0 - amount * (square.view(1, 1, 1, -1) + square.view(1, 1, -1, 1)))


def _photo(pixels: Tensor, scenes: Scenes) -> Tensor:
    return _vignette(pixels, 0.25) + (_grain(scenes, pixels.shape[-1]) - 0.5).unsqueeze(1) * 0.045


def _sketch(pixels: Tensor, scenes: Scenes) -> Tensor:
    side = pixels.shape[-1]
    gray = luminance(pixels)
    line = (_slopes(pixels).amax(1) * 2.6 - 0.10).clamp(0, 1)
    grain = _grain(scenes, side)
    hatch = (grain - 0.35) * (1.0 - gray) * 0.45
    paper = 0.965 - 0.05 * _grain(scenes, side, 1)
    drawn = paper - line * (0.62 + 0.25 * grain) - hatch.clamp_min(0)
    return drawn.unsqueeze(1).expand(-1, 3, -1, -1)


def _cartoon(pixels: Tensor, scenes: Scenes) -> Tensor:
    gray = luminance(pixels).unsqueeze(1)
    vivid = (gray + (pixels - gray) * 1.35).clamp(0, 1)
    flat = (vivid * 4.0 + 0.5).floor() / 4.0
    ink = (_slopes(flat).amax(1, keepdim=True) * 1.5 - 0.45).clamp(0, 0.85)
    return flat * (1.0 - ink) + 0.04


def _painting(pixels: Tensor, scenes: Scenes) -> Tensor:
    side = pixels.shape[-1]
    # Brush strokes: every pixel takes its color from a few pixels off, in a direction that varies slowly.
    reach = 3.0 * side / 64
    right = (_grain(scenes, side, 2) - 0.5) * reach * 1.6 + (_grain(scenes, side, 1) - 0.5) * reach
    down = (noise(2, scenes.variation("style_1"), scenes.variation("style_0"), side) - 0.5) * reach * 1.6
    strokes = (shift_pixels(pixels, right, down) * 7.0 + 0.5).floor() / 7.0
    bristle = _grain(scenes, side, 1) * 0.16 - 0.08
    return strokes * 0.94 + 0.04 + bristle.unsqueeze(1)


def _pixelated(pixels: Tensor, scenes: Scenes) -> Tensor:
    block = pixels.shape[-1] // 16
    total = pixels[..., 0::block, :].clone()
    for step in range(1, block):
        total += pixels[..., step::block, :]
    summed = total[..., 0::block].clone()
    for step in range(1, block):
        summed += total[..., step::block]
    coarse = (summed / float(block * block) * 9.0 + 0.5).floor() / 9.0
    return coarse.repeat_interleave(block, -1).repeat_interleave(block, -2)


def _blurry(pixels: Tensor, scenes: Scenes) -> Tensor:
    return blur(blur(pixels, 2), 1)


def _sepia(pixels: Tensor, scenes: Scenes) -> Tensor:
    gray = luminance(pixels) * 0.82 + 0.12 + (_grain(scenes, pixels.shape[-1]) - 0.5) * 0.06
    toned = torch.stack((gray * 1.08, gray * 0.86, gray * 0.62), dim=1)
    return _vignette(toned, 0.7)


def _neon(pixels: Tensor, scenes: Scenes) -> Tensor:
    edges = (_slopes(pixels) * 2.2 - 0.12).clamp(0, 1)
    strength = edges.amax(1)
    hue = scenes.variation("style_0").view(-1, 1, 1)
    gray = luminance(pixels)
    # Tubes glow from magenta to cyan with the brightness of what they outline.
    mix = (gray + hue * 0.6 - 0.3).clamp(0, 1)
    tube = torch.stack((strength * (1.0 - 0.9 * mix), strength * (0.15 + 0.85 * mix), strength), dim=1)
    glow = blur(tube, 2)
    return tube * 0.95 + glow * 1.1 + gray.unsqueeze(1) * 0.08 + 0.01


#: by row of `factors.STYLES`
STYLES: tuple[Callable[[Tensor, Scenes], Tensor], ...] = (
    _photo, _sketch, _cartoon, _painting, _pixelated, _blurry, _sepia, _neon
)  # fmt: skip
OUTLINE = (0.5, 1.1, 1.7, 0.4, 0.5, 0.4, 0.6, 1.0)  # width of the subject's dark outline in pixels, by style
