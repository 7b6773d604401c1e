"""Photos and generators for tests of random views."""

import numpy as np
import torch
from PIL import Image


def photo(width, height, seed=0):
    """An image with smooth parts and sharp edges, so that overshoot and clipping are met."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    image = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).copy()
    image[height // 3 :, width // 2 :] = rng.integers(0, 2, 3) * 255
    return Image.fromarray(image)


def tensor(image):
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)
