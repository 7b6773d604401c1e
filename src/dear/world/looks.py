"""Looks that pretraining never shows: how each task differs from the images the backbone was made with.

A look changes finished images [b, 3, side, side] in 0..1. `strength` blends: 0 leaves the
images as pretraining would show them, 1 is the full look. What a look does is the same for all images
of a task, so it can be learned from few of them; a little noise differs from image to image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dear.world.exact import column, fraction, noise, wave, zigzag
from dear.world.scenes import Scenes
from dear.world.styles import blur, luminance, shift_pixels

Look = Callable[[Tensor, Scenes, float], Tensor]


def unchanged(pixels: Tensor, scenes: Scenes, strength: float) -> Tensor:
    """Images as pretraining shows them."""
    return pixels


def _blend(plain: Tensor, look: Tensor, strength: float) -> Tensor:
    return plain + (look - plain) * strength


def _grain(scenes: Scenes, side: int, grain: int = 0) -> Tensor:
    """Noise [b, side, side] in -1..1, from another window of the noise than styles use."""
    return noise(grain, scenes.variation("style_1"), scenes.variation("noise_x"), side) * 2.0 - 1.0


def _axes(pixels: Tensor) -> tuple[Tensor, Tensor]:
    side = pixels.shape[-1]
    axis = (torch.arange(side, device=pixels.device, dtype=torch.float32) + 0.5) / side
    return axis.view(1, 1, -1), axis.view(1, -1, 1)


def _edges(pixels: Tensor) -> Tensor:
    """How strongly an image changes at every pixel, [b, side, side]."""
    gray = luminance(pixels)
    across = torch.zeros_like(gray)
    across[..., :, 1:] = (gray[..., :, 1:] - gray[..., :, :-1]).abs()
    across[..., 1:, :] += (gray[..., 1:, :] - gray[..., :-1, :]).abs()
    return across


def fabric(pixels: Tensor, scenes: Scenes, strength: float) -> Tensor:
    """Printed on cloth: threads cross the image, ink bleeds, colors fade toward a dye."""
    x, y = _axes(pixels)
    thread = wave(x * 21.0 + 0.08 * wave(y * 3.0)) * wave(y * 21.0) * 0.30
    faded = blur(pixels, 1) * 0.42 + 0.30
    dye = pixels.new_tensor((0.08, -0.02, -0.10)).view(1, 3, 1, 1)
    look = faded + dye + (thread + _grain(scenes, pixels.shape[-1]) * 0.06).unsqueeze(1)
    return _blend(pixels, look, strength)


def enamel(pixels: Tensor, scenes: Scenes, strength: float) -> Tensor:
    """An enamel badge under warm light: colors leak into each other, a gloss runs across, a dark rim."""
    x, y = _axes(pixels)
    red, green, blue = pixels[:, 0], pixels[:, 1], pixels[:, 2]
    warm = torch.stack(
        (
            0.55 * red + 0.30 * green + 0.18,
            0.30 * red + 0.40 * green + 0.15 * blue + 0.04,
            0.35 * blue + 0.30 * green + 0.02,
        ),
        dim=1,
    )
    gloss = (
        0.5 - (fraction(x * 1.5 + y * 1.5 + column(scenes.variation("style_0"))) - 0.5).abs() * 3.0
    ).clamp(0, 1)
    dx, dy = x - 0.5, y - 0.5
    rim = ((dx * dx + dy * dy) * 5.0 - 0.9).clamp(0, 1)
    look = (warm + gloss.unsqueeze(1) * 0.35) * (1.0 - 0.75 * rim).unsqueeze(1)
    return _blend(pixels, look + _grain(scenes, pixels.shape[-1]).unsqueeze(1) * 0.03, strength)


def blueprint(pixels: Tensor, scenes: Scenes, strength: float) -> Tensor:
    """A technical drawing in slanted projection: pale lines over blue paper ruled with a grid."""
    rows = torch.arange(pixels.shape[-1], device=pixels.device, dtype=torch.float32)
    slant = (rows - (pixels.shape[-1] - 1) / 2) * (0.75 * strength)
    pixels = shift_pixels(pixels, slant.view(1, -1, 1), torch.zeros_like(slant).view(1, 1, -1))
    x, y = _axes(pixels)
    line = (_edges(pixels) * 2.4 - 0.08).clamp(0, 1)
    rule = ((fraction(x * 8.0) < 0.12) | (fraction(y * 8.0) < 0.12)).float() * 0.14
    value = line * 0.8 + rule + _grain(scenes, pixels.shape[-1]) * 0.03
    paper = pixels.new_tensor((0.08, 0.20, 0.46)).view(1, 3, 1, 1)
    look = paper + value.unsqueeze(1) * pixels.new_tensor((0.85, 0.80, 0.52)).view(1, 3, 1, 1)
    return _blend(pixels, look, 0.6 * strength)


def infrared(pixels: Tensor, scenes: Scenes, strength: float) -> Tensor:
    """A false-color recording: colors change places, darks get darker, lines of the sensor show."""
    _, y = _axes(pixels)
    red, green, blue = pixels[:, 0], pixels[:, 1], pixels[:, 2]
    false = torch.stack((green * green, blue * red, red), dim=1)
    lines = wave(y * 16.0) * 0.10 + _grain(scenes, pixels.shape[-1]) * 0.06
    return _blend(pixels, blur(false, 1) + lines.unsqueeze(1), strength)


def ripple(pixels: Tensor, scenes: Scenes, strength: float) -> Tensor:
    """Reflected in water: upside down (at any strength), swinging with the waves, greenish, crests shine."""
    side = pixels.shape[-1]
    _, y = _axes(pixels)
    swing = wave(y * 5.0) * (strength * side * 0.05)
    pixels = shift_pixels(pixels.flip(2) if strength > 0 else pixels, swing, torch.zeros_like(swing))
    gray = luminance(pixels)
    water = torch.stack((gray * 0.55, gray * 0.90 + 0.06, gray * 0.80 + 0.08), dim=1)
    shine = (wave(y * 10.0 + 0.25) - 0.4).clamp_min(0) * 0.25 + _grain(scenes, side) * 0.03
    return _blend(pixels, water + shine.unsqueeze(1), 0.3 * strength)


def mosaic(pixels: Tensor, scenes: Scenes, strength: float) -> Tensor:
    """Laid in small stones: grout between them, every stone a little off in tone, under cold light."""
    x, y = _axes(pixels)
    row = (y * 16.0).floor()
    across = x * 16.0 + row * 0.5
    grout = (fraction(across) < 0.22) | (fraction(y * 16.0) < 0.22)
    stone = (
        fraction(fraction(across.floor() * 0.618 + row * 0.733 + column(scenes.variation("style_0"))) * 9.7)
        - 0.5
    )
    cold = pixels.new_tensor((0.66, 0.86, 1.0)).view(1, 3, 1, 1)
    look = (pixels * 0.75 + 0.10 + stone.unsqueeze(1) * 0.34) * cold
    look = torch.where(grout.unsqueeze(1), 0.72, look)
    return _blend(pixels, look, strength)


def worn(pixels: Tensor, scenes: Scenes, strength: float) -> Tensor:
    """An old print: folded, faded, scratched and stained."""
    side = pixels.shape[-1]
    x, _ = _axes(pixels)
    fold = zigzag(x * 2.5 + 0.1) * (strength * side * 0.06)
    pixels = shift_pixels(pixels, torch.zeros_like(fold), fold)
    scratch = (0.06 - (fraction(x * 5.0 + _grain(scenes, side, 3) * 0.25) - 0.5).abs()).clamp_min(0) * 14.0
    stain = (_grain(scenes, side, 3) - 0.1).clamp_min(0) * 0.6
    faded = pixels * 0.6 + 0.24
    look = faded + (scratch * 0.5 - stain + _grain(scenes, side) * 0.08).unsqueeze(1)
    return _blend(pixels, look, 0.75 * strength)
