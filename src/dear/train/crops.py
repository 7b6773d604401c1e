"""Training views: a random crop resized (bicubic) and a random flip, driven by the caller's generator.

The crop covers 0.5 to 1 of the image's area with an aspect of 3/4 to 4/3, as in the field's recipe
(torchvision's RandomResizedCrop). `augment_image` does it with Pillow on one image, `augment_batch` on a
whole batch of tensors, on their device. Bicubic resizing is separable, so a batch costs two batched matrix
products with one weight matrix per image and axis; the weights are Pillow's (antialiased, a = -0.5), and
both functions draw the same numbers in the same order, so their views are the same to one step of 255.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dear.errors import InputError
from dear.images.open import open_image
from dear.images.resample_tensors import resampling_weights, round_to_bytes
from dear.images.views import to_tensor

SCALE = (0.5, 1.0)
RATIO = (3 / 4, 4 / 3)
FLIP = 0.5
_TRIES = 10


def sample_boxes(
    sizes: Tensor,
    generator: torch.Generator,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
    flip: float = FLIP,
) -> tuple[Tensor, Tensor]:
    """Crops and flips for B images.

    Each image has ten tries to draw an area and an aspect that fit; failing all, its crop is the largest
    centered one of an allowed aspect. An image always takes the same count of random numbers, so the draws
    of one do not depend on the shapes of those before it.

    Args:
        sizes: int64 [B, 2], height and width of each image.
        generator: a CPU generator; it is advanced.
        scale: smallest and largest share of the area.
        ratio: smallest and largest width / height.
        flip: probability of a flip.

    Returns:
        Boxes int64 [B, 4] as (top, left, height, width), and flips bool [B], both on the CPU.
    """
    if not 0 < scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
        raise InputError(f"scale must ascend within (0, 1] and ratio be positive, got {scale} and {ratio}")
    count = len(sizes)
    draws = torch.rand(count, 2 * _TRIES + 3, generator=generator, dtype=torch.float64)
    height, width = sizes.to("cpu", torch.float64).unbind(1)  # [B], [B]

    area = (height * width)[:, None] * _between(draws[:, :_TRIES], *scale)  # [B, tries]
    aspect = _between(draws[:, _TRIES : 2 * _TRIES], math.log(ratio[0]), math.log(ratio[1])).exp()
    widths = (area * aspect).sqrt().round()
    heights = (area / aspect).sqrt().round()
    fits = (widths >= 1) & (heights >= 1) & (widths <= width[:, None]) & (heights <= height[:, None])
    first = fits.to(torch.int64).argmax(1, keepdim=True)
    any_fits = fits.any(1)

    largest = (width / height).clamp(*ratio)  # aspect of the largest crop
    crop_h = torch.where(
        any_fits, heights.gather(1, first)[:, 0], torch.minimum(height, (width / largest).round())
    )
    crop_w = torch.where(
        any_fits, widths.gather(1, first)[:, 0], torch.minimum(width, (height * largest).round())
    )
    crop_h, crop_w = crop_h.clamp(min=1), crop_w.clamp(min=1)
    top = torch.where(any_fits, draws[:, -3] * (height - crop_h + 1), (height - crop_h) / 2).floor()
    left = torch.where(any_fits, draws[:, -2] * (width - crop_w + 1), (width - crop_w) / 2).floor()
    return torch.stack((top, left, crop_h, crop_w), 1).to(torch.int64), draws[:, -1] < flip


def _between(uniform: Tensor, low: float, high: float) -> Tensor:
    return low + uniform * (high - low)


def augment_image(
    image: Image.Image,
    size: int,
    generator: torch.Generator,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
) -> Tensor:
    """A random training view of one image, uint8 [3, size, size].

    >>> view = augment_image(Image.new("RGB", (40, 30), "red"), 16, torch.Generator().manual_seed(0))
    >>> view.shape, view[:, 5, 5].tolist()
    (torch.Size([3, 16, 16]), [255, 0, 0])
    """
    image = open_image(image)
    boxes, flips = sample_boxes(torch.tensor([[image.height, image.width]]), generator, scale, ratio)
    top, left, height, width = boxes[0].tolist()
    crop = image.crop((left, top, left + width, top + height))
    # First across, then down, as the batch does: in one call Pillow chooses the order by the crop's shape.
    narrow = crop.resize((size, height), Image.Resampling.BICUBIC)
    view = to_tensor(np.array(narrow.resize((size, size), Image.Resampling.BICUBIC)))
    return view.flip(-1) if bool(flips[0]) else view


def augment_batch(
    pixels: Tensor,
    size: int,
    generator: torch.Generator,
    scale: tuple[float, float] = SCALE,
    flip: float = FLIP,
    sizes: Tensor | None = None,
) -> Tensor:
    """A random training view of every image of a batch, on its device: float32 [B, 3, size, size] in [0, 1].

    Of `pixels`, uint8 [B, 3, h, w], images smaller than h x w stand in the top left corner; `sizes` [B, 2]
    are their true heights and widths (None: all h x w). The draws are those of `sample_boxes`, whatever the
    device.

    >>> batch = torch.zeros(2, 3, 30, 40, dtype=torch.uint8)
    >>> augment_batch(batch, 16, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 16, 16])
    """
    height, width = pixels.shape[-2:]
    if sizes is None:
        sizes = torch.tensor([[height, width]]).expand(len(pixels), 2)
    boxes, flips = sample_boxes(sizes, generator, scale, flip=flip)
    device = pixels.device
    boxes, flips = boxes.to(device, non_blocking=True), flips.to(device, non_blocking=True)
    return crop_batch(pixels, boxes, flips, size)


def crop_batch(pixels: Tensor, boxes: Tensor, flips: Tensor, size: int) -> Tensor:
    """Cut a box out of every image [B, 3, h, w] and resize it as Pillow's bicubic does.

    Boxes [B, 4] and flips [B] are those of `sample_boxes`, on the device of the pixels; the results are
    float32 [B, 3, size, size] in [0, 1].
    """
    count, colors, height, width = pixels.shape
    across = resampling_weights(boxes[:, 1], boxes[:, 3], width, size)  # [B, S, w]
    across = torch.where(flips[:, None, None], across.flip(1), across)
    down = resampling_weights(boxes[:, 0], boxes[:, 2], height, size)  # [B, S, h]
    # Mixed precision would round the weights; Pillow keeps 8 bits between the passes, and so do we.
    with torch.autocast(pixels.device.type, enabled=False):
        rows = pixels.float().reshape(count, colors * height, width)  # [B, 3h, w]
        narrow = round_to_bytes(torch.bmm(rows, across.transpose(1, 2)))  # [B, 3h, S]
        narrow = narrow.view(count, colors, height, size)  # [B, 3h, S] -> [B, 3, h, S]
        square = round_to_bytes(torch.matmul(down[:, None], narrow))  # [B, 3, S, S]
    return square / 255
