"""From an image to CLIP's input tensor; reading image files is `dear._io.image_file`'s work."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dear._io.image_file import FORMATS, MAX_ASPECT, MAX_PIXELS, open_image, resize_short, square

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "FORMATS",
    "MAX_ASPECT",
    "MAX_PIXELS",
    "normalize",
    "open_image",
    "preprocess",
    "resize_crop",
    "resize_short",
    "to_tensor",
]


def resize_crop(image: Image.Image, size: int) -> Tensor:
    """CLIP's view of an image: short side to `size` bicubic, then the center.

    Args:
        image: a Pillow image; other modes than RGB are converted as in `open_image`.
        size: side of the result in pixels.

    Returns:
        uint8 [3, size, size].

    >>> resize_crop(Image.new("RGB", (30, 20), (1, 2, 3)), 8)[:, 0, 0].tolist()
    [1, 2, 3]
    """
    return to_tensor(square(image, size))


def to_tensor(image: Image.Image) -> Tensor:
    """An RGB image as uint8 [3, height, width]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


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
    """A number a color as [3, 1, 1]; kept, for bringing it to a GPU makes the host wait."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(3, 1, 1)


def preprocess(
    image: Image.Image, size: int, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD
) -> Tensor:
    """One row of CLIP's input: `resize_crop`, then `normalize`.

    Returns:
        float32 [3, size, size].
    """
    return normalize(resize_crop(image, size), mean, std)
