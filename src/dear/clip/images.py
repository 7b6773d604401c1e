"""From pixels to CLIP's input tensor; reading and resizing images is the work of `dear._io`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from PIL import Image
from torch import Tensor

from dear._io.image_file import Size, resize_crop
from dear.clip.config import CLIP_MEAN, CLIP_STD


def normalize(pixels: Tensor, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD) -> Tensor:
    """Subtract the mean and divide by the standard deviation of each color.

    Args:
        pixels: [..., 3, h, w], uint8, or floating point in [0, 1].
        mean: of each color, for values in [0, 1].
        std: of each color.

    Returns:
        float [..., 3, h, w] on the same device.
    """
    values = pixels if pixels.is_floating_point() else pixels.float() / 255
    center = _colors(tuple(mean), values.dtype, values.device)
    spread = _colors(tuple(std), values.dtype, values.device)
    return (values - center) / spread


@lru_cache(maxsize=32)
def _colors(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One value per color as [3, 1, 1]; cached, because copying it to a GPU makes the host wait."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(3, 1, 1)


def preprocess(
    image: Image.Image, size: Size, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD
) -> Tensor:
    """One row of CLIP's input: `resize_crop`, then `normalize`.

    Returns:
        float32 [3, size, size].
    """
    return normalize(resize_crop(image, size), mean, std)
