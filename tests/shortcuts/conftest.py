"""Images that vary as photos do: smooth random fields of color, each with its own light."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from dear.data.images import ListedImages

CLASSES = ("ant", "bee", "cat", "dog", "elk", "fox")
PER_CLASS = 20


def photo(rng: np.random.Generator) -> Image.Image:
    """A random image with large and small structure."""
    wide, high = int(rng.integers(90, 150)), int(rng.integers(90, 150))
    coarse = rng.uniform(0, 255, (6, 6, 3)).astype(np.uint8)
    fine = rng.normal(0, 25, (high, wide, 1))
    base = np.asarray(Image.fromarray(coarse).resize((wide, high), Image.Resampling.BICUBIC), dtype=float)
    light = rng.uniform(0.6, 1.2)
    return Image.fromarray(np.clip((base + fine) * light, 0, 255).astype(np.uint8))


@pytest.fixture(scope="session")
def photos() -> ListedImages:
    rng = np.random.default_rng(7)
    images = tuple(photo(rng) for _ in range(len(CLASSES) * PER_CLASS))
    labels = torch.arange(len(CLASSES)).repeat_interleave(PER_CLASS)
    return ListedImages(images, labels, CLASSES)
