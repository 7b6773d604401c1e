"""Made-up food photos and a tiny local backbone, for tests of a new user's path."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from dear.clip import Clip, ClipConfig, TextConfig, VisionConfig
from dear.clip.checkpoint import save_hf

FOODS = {"apple_pie": (190, 130, 60), "green_salad": (60, 160, 50), "tomato_soup": (200, 50, 30)}


def photos(root: Path, each: int = 10, foods: dict[str, tuple[int, int, int]] = FOODS) -> Path:
    """A folder of class folders with round things on plates."""
    rng = random.Random(1)
    for name, color in foods.items():
        (root / name).mkdir(parents=True)
        for number in range(each):
            image = Image.new("RGB", (72, 56), tuple(rng.randrange(200, 250) for _ in range(3)))
            pen = ImageDraw.Draw(image)
            x, y, r = rng.randrange(20, 50), rng.randrange(20, 36), rng.randrange(12, 20)
            tone = tuple(max(0, min(255, c + rng.randrange(-25, 25))) for c in color)
            pen.ellipse((x - r, y - r, x + r, y + r), fill=tone)
            image.save(root / name / f"IMG_{number:03d}.jpg")
    return root


def backbone(folder: Path, seed: int = 3) -> Path:
    """A random CLIP with the whole vocabulary, as a folder in Hugging Face's layout."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    config = ClipConfig(
        VisionConfig(width=64, layers=6, heads=4, image_size=32, patch_size=8),
        TextConfig(width=32, layers=3, heads=2),
        embed_dim=32,
    )
    save_hf(Clip(config, name="tiny-clip"), folder)
    torch.set_rng_state(state)
    return folder
