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


def scene(rng: np.random.Generator) -> Image.Image:
    """An image with smooth, nearly neutral areas from black to white, and some color."""
    wide, high = int(rng.integers(90, 150)), int(rng.integers(90, 150))
    coarse = rng.uniform(-40, 300, (6, 6, 1)) + rng.normal(0, 15, (6, 6, 3))
    coarse = np.clip(coarse, 0, 255).astype(np.uint8)
    base = np.asarray(Image.fromarray(coarse).resize((wide, high), Image.Resampling.BICUBIC), dtype=float)
    base = base * rng.uniform(0.6, 1.1) + rng.uniform(0, 15)
    noise = rng.normal(0, rng.uniform(1, 4), (high, wide, 1))
    return Image.fromarray(np.clip(base + noise, 0, 255).astype(np.uint8))


@pytest.fixture(scope="session")
def scenes() -> ListedImages:
    rng = np.random.default_rng(11)
    images = tuple(scene(rng) for _ in range(len(CLASSES) * PER_CLASS))
    labels = torch.arange(len(CLASSES)).repeat_interleave(PER_CLASS)
    return ListedImages(images, labels, CLASSES)


@pytest.fixture(scope="session")
def photos() -> ListedImages:
    rng = np.random.default_rng(7)
    images = tuple(photo(rng) for _ in range(len(CLASSES) * PER_CLASS))
    labels = torch.arange(len(CLASSES)).repeat_interleave(PER_CLASS)
    return ListedImages(images, labels, CLASSES)
