"""Images as uint8 tensors: the step between an image file and a batch, independent of any model."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dear._io.image_file import Size, square


def to_tensor(image: Image.Image) -> Tensor:
    """An RGB image as uint8 [3, height, width]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def resize_crop(image: Image.Image, size: Size) -> Tensor:
    """A model's view of an image: by default the short side to `size` bicubic, then the center.

    Args:
        image: a Pillow image; other modes than RGB are converted as in `open_image`.
        size: side of the result in pixels, or a `View`.

    Returns:
        uint8 [3, size, size].

    >>> resize_crop(Image.new("RGB", (30, 20), (1, 2, 3)), 8)[:, 0, 0].tolist()
    [1, 2, 3]
    """
    return to_tensor(square(image, size))
