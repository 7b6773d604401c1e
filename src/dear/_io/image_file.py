"""From image files to the square of pixels that CLIP sees.

`read_views` makes the views of many files, `resize_crop` that of one; `square` gives it as a Pillow image.
An exported model runs with these where PyTorch is not installed; only functions of tensors need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from dear._io.batches import in_batches, threaded
from dear._io.image_names import find_images, image_paths, is_image_name, is_own_name
from dear._io.image_open import FORMATS, MAX_PIXELS, Source, open_image, open_pixels
from dear._io.resample import Pixels, resample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "FORMATS", "MAX_PIXELS", "Size", "Source", "View", "find_images", "image_paths", "in_batches",
    "is_image_name", "is_own_name", "normalize", "open_image", "read_views", "resize_crop", "resize_short",
    "side_of", "square", "threaded", "to_tensor", "view_pixels",
]  # fmt: skip
# Of an image longer than this (times its short side) only the middle is kept: resized, it would fill memory.
MAX_ASPECT = 16


@dataclass(frozen=True)
class View:
    """How an image becomes a square: its side in pixels, and how it is resized.

    By default the short side is resized and the center kept; with `squash` both sides are resized.
    """

    size: int
    squash: bool = False
    bilinear: bool = False


Size = int | View  #: the side of a square cut from the middle, or the whole rule


def side_of(size: Size) -> int:
    """The side of the square in pixels."""
    return size if isinstance(size, int) else size.size


def resize_short(pixels: Pixels, size: int, bilinear: bool = False) -> Pixels:
    """Short side to `size`, bicubic, aspect kept; the long side is rounded down, as in CLIP's transform.

    >>> resize_short(np.zeros((51, 100, 3), np.uint8), 10).shape
    (10, 19, 3)
    """
    height, width = pixels.shape[:2]
    limit = MAX_ASPECT * min(width, height)
    if max(width, height) > limit:
        top, left = max(0, (height - limit) // 2), max(0, (width - limit) // 2)
        pixels = np.ascontiguousarray(pixels[top : top + limit, left : left + limit])
        height, width = pixels.shape[:2]
    long = int(size * max(width, height) / min(width, height))
    if min(width, height) == size:
        return pixels
    across, down = (size, long) if width <= height else (long, size)
    return resample(pixels, across, down, bilinear)


def view_pixels(source: Source, size: Size) -> Pixels:
    """A model's view of an image: by default the short side to `size` bicubic, then the center.

    The corner of the crop is rounded half to even, as in CLIP's transform; modes, rotation and transparency
    are those of `open_image`.
    """
    view = size if isinstance(size, View) else View(size)
    pixels, side = open_pixels(source, scratch=True), view.size
    if view.squash:
        found = resample(pixels, side, side, view.bilinear)
    else:
        short = resize_short(pixels, side, view.bilinear)
        height, width = short.shape[:2]
        left, top = round((width - side) / 2), round((height - side) / 2)
        found = short[top : top + side, left : left + side]
    return found.copy() if np.may_share_memory(found, pixels) else found


def square(image: Source, size: Size) -> Image.Image:
    """`view_pixels` as a Pillow image.

    >>> wide = Image.new("RGB", (30, 20))
    >>> square(wide, 8).size, square(wide, View(8, squash=True)).size
    ((8, 8), (8, 8))
    """
    return Image.fromarray(np.ascontiguousarray(view_pixels(image, size)))


def to_tensor(pixels: Pixels) -> Tensor:
    """[height, width, 3] as uint8 [3, height, width]."""
    import torch  # not above: see the head of this file

    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def resize_crop(image: Source, size: Size) -> Tensor:
    """`view_pixels` as uint8 [3, size, size].

    >>> resize_crop(Image.new("RGB", (30, 20), (1, 2, 3)), 8)[:, 0, 0].tolist()
    [1, 2, 3]
    """
    return to_tensor(view_pixels(image, size))


def read_views(sources: Sequence[Source], size: Size) -> Tensor:
    """The views of many images, uint8 [b, 3, size, size], decoded by several threads into one buffer."""
    import torch

    side = side_of(size)
    batch = np.empty((len(sources), 3, side, side), np.uint8)

    def read(place: int) -> None:  # NumPy copies: PyTorch would start threads of its own in each thread
        batch[place] = view_pixels(sources[place], size).transpose(2, 0, 1)

    threaded(read, range(len(sources)))
    with torch.inference_mode(False):
        return torch.from_numpy(batch)


def normalize(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Subtract the mean and divide by the standard deviation of each color.

    Args:
        pixels: [..., 3, h, w], uint8, or floating point in [0, 1].
        mean: of each color, for values in [0, 1].
        std: of each color.

    Returns:
        float [..., 3, h, w] on the same device.
    """
    fresh = not pixels.is_floating_point()
    values = pixels.float().div_(255) if fresh else pixels
    center = _colors(tuple(mean), values.dtype, values.device)
    spread = _colors(tuple(std), values.dtype, values.device)
    return (values.sub_(center) if fresh else values - center).div_(spread)


@lru_cache(maxsize=32)
def _colors(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One value per color as [3, 1, 1]; cached, because copying it to a GPU makes the host wait."""
    import torch

    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(3, 1, 1)
