"""From image files to the square of pixels that CLIP sees.

`read_views` returns the views of many files, `resize_crop` that of one, `square` that as a Pillow image.
An exported model runs with these where PyTorch is not installed; functions of tensors import it themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from dear.images.open import ImageLike, open_pixels
from dear.images.resample import Pixels, resample
from dear.utils.parallel import map_threads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Of an image longer than this (times its short side) only the middle is used: resized, it would fill memory.
MAX_ASPECT = 16
MAX_CPU_IMAGES = 16  #: up to this many, the CPU decodes: the GPU's decoder takes a while to start


@dataclass(frozen=True)
class View:
    """How an image is turned into a square: its side in pixels, and how it is resized.

    By default the short side is resized and the center kept; with `squash` both sides are resized.
    """

    size: int
    squash: bool = False
    bilinear: bool = False


Size = int | View  #: the side of a center crop, or a `View`


def side_of(size: Size) -> int:
    """The side of the square in pixels."""
    return size if isinstance(size, int) else size.size


@dataclass(frozen=True)
class Axis:
    """Resizing along one axis of an image: a range of pixels is resized, and a part of the result is kept."""

    start: int  #: first pixel that is used
    length: int  #: pixels that are used
    resized: int  #: number of pixels they are resized to
    first: int  #: of the resized pixels, the first one that the view shows


@lru_cache(maxsize=4096)
def axes_of(width: int, height: int, size: Size) -> tuple[Axis, Axis]:
    """Resizing of an image to a view, across and down.

    The long side is rounded down and the corner of the crop is rounded half to even, as in CLIP's transform.

    >>> axes_of(100, 51, 10)
    (Axis(start=0, length=100, resized=19, first=4), Axis(start=0, length=51, resized=10, first=0))
    """
    side, short = side_of(size), min(width, height)
    used = [min(length, MAX_ASPECT * short) for length in (width, height)]
    if isinstance(size, View) and size.squash:
        return Axis(0, width, side, 0), Axis(0, height, side, 0)
    resized = [side if length == short else int(side * length / short) for length in used]
    across, down = (
        Axis((extent - length) // 2, length, new, round((new - side) / 2))
        for extent, length, new in zip((width, height), used, resized, strict=True)
    )
    return across, down


def _resize(pixels: Pixels, across: Axis, down: Axis, bilinear: bool) -> Pixels:
    if (down.length, across.length) != pixels.shape[:2]:
        rows, columns = (slice(axis.start, axis.start + axis.length) for axis in (down, across))
        pixels = np.ascontiguousarray(pixels[rows, columns])
    return resample(pixels, across.resized, down.resized, bilinear)


def resize_short(pixels: Pixels, size: int, bilinear: bool = False) -> Pixels:
    """Short side to `size`, bicubic, aspect kept; of an image longer than `MAX_ASPECT` only the middle.

    >>> resize_short(np.zeros((51, 100, 3), np.uint8), 10).shape
    (10, 19, 3)
    """
    height, width = pixels.shape[:2]
    return _resize(pixels, *axes_of(width, height, size), bilinear)


def view_pixels(source: ImageLike, size: Size) -> Pixels:
    """A model's view of an image: by default the short side to `size` bicubic, then the center.

    Modes, rotation and transparency are those of `open_image`.
    """
    pixels, side = open_pixels(source, scratch=True), side_of(size)
    across, down = axes_of(pixels.shape[1], pixels.shape[0], size)
    resized = _resize(pixels, across, down, isinstance(size, View) and size.bilinear)
    view = resized[down.first : down.first + side, across.first : across.first + side]
    return view.copy() if np.may_share_memory(view, pixels) else view


def square(image: ImageLike, size: Size) -> Image.Image:
    """`view_pixels` as a Pillow image.

    >>> wide = Image.new("RGB", (30, 20))
    >>> square(wide, 8).size, square(wide, View(8, squash=True)).size
    ((8, 8), (8, 8))
    """
    return Image.fromarray(np.ascontiguousarray(view_pixels(image, size)))


def to_tensor(pixels: Pixels) -> Tensor:
    """[height, width, 3] as uint8 [3, height, width]."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def resize_crop(image: ImageLike, size: Size) -> Tensor:
    """`view_pixels` as uint8 [3, size, size].

    >>> resize_crop(Image.new("RGB", (30, 20), (1, 2, 3)), 8)[:, 0, 0].tolist()
    [1, 2, 3]
    """
    return to_tensor(view_pixels(image, size))


def read_views(sources: Sequence[ImageLike], size: Size, device: torch.device | None = None) -> Tensor:
    """The views of many images, uint8 [b, 3, size, size], decoded by several threads into one buffer.

    On a GPU that can decode (`dear.images.gpu`), plain JPEG files are decoded and resized there, unless
    they are few: its decoder takes a while to start.
    """
    import torch

    if device is not None and device.type == "cuda" and len(sources) > MAX_CPU_IMAGES:
        from dear.images.gpu import decoder_of, device_views  # here: an exported model runs without it

        decode = decoder_of(device)
        if decode is not None:
            return device_views(sources, size, device, decode)
    side = side_of(size)
    batch = np.empty((len(sources), 3, side, side), np.uint8)

    def read(index: int) -> None:  # NumPy copies: PyTorch would start more threads in each thread
        batch[index] = view_pixels(sources[index], size).transpose(2, 0, 1)

    map_threads(read, range(len(sources)))
    with torch.inference_mode(False):
        views = torch.from_numpy(batch)
        return views if device is None else views.to(device)


def normalize(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Subtract the mean and divide by the standard deviation of each color.

    Args:
        pixels: [..., 3, h, w], uint8, or floating point in [0, 1].
        mean: of each color, for values in [0, 1].
        std: of each color.

    Returns:
        float [..., 3, h, w] on the same device.
    """
    is_bytes = not pixels.is_floating_point()
    values = pixels.float().div_(255) if is_bytes else pixels
    center = _colors(tuple(mean), values.dtype, values.device)
    spread = _colors(tuple(std), values.dtype, values.device)
    return (values.sub_(center) if is_bytes else values - center).div_(spread)


@lru_cache(maxsize=32)
def _colors(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One value per color as [3, 1, 1]; cached, because copying it to a GPU makes the host wait."""
    import torch

    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(3, 1, 1)
