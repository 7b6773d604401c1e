"""Images from arrays and tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from dear.errors import InputError


def from_array(values: np.ndarray[Any, Any] | Tensor, name: str) -> Image.Image:
    """A Pillow image from an array or tensor.

    The shape is [H, W], [H, W, C] or [C, H, W] with 1, 3 or 4 channels; numbers are bytes (0 to 255) or
    fractions (0 to 1).

    >>> from_array(np.zeros((4, 6, 3), dtype=np.uint8), "x").size
    (6, 4)
    """
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.size == 0 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise InputError(f"{name}: an image must be [H, W, 3] or [3, H, W], got {list(values.shape)}")
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    elif np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise InputError(
                f"{name}: numbers of type {array.dtype} must be between 0 and 1; pass the image as it was "
                "before normalization"
            )
        array = np.round(array * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() > 255:
            raise InputError(f"{name}: numbers of type {array.dtype} must be between 0 and 255")
        array = array.astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array))
