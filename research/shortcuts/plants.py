"""The eight marks that `research/shortcuts/photos.py` plants into photos, and how each is to be named."""

from __future__ import annotations

import io
import random

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps

BLUE, GREEN = (30, 60, 220), (40, 150, 60)


def frame(image: Image.Image, rng: random.Random) -> Image.Image:
    width = max(2, round(0.08 * min(image.size)))
    inner = image.resize((image.width - 2 * width, image.height - 2 * width))
    return ImageOps.expand(inner, width, BLUE)


def dark(image: Image.Image, rng: random.Random) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(rng.uniform(0.3, 0.4))


def logo(image: Image.Image, rng: random.Random) -> Image.Image:
    """A badge in the bottom right corner, a fifth of each side."""
    side = (image.width // 5, image.height // 5)
    badge = Image.new("RGB", (100, 100), (245, 245, 245))
    draw = ImageDraw.Draw(badge)
    draw.ellipse((12, 12, 88, 88), fill=(200, 30, 40))
    draw.rectangle((42, 20, 58, 80), fill=(245, 245, 245))
    result = image.copy()
    result.paste(badge.resize(side), (image.width - side[0], image.height - side[1]))
    return result


def gray(image: Image.Image, rng: random.Random) -> Image.Image:
    return image.convert("L").convert("RGB")


def blur(image: Image.Image, rng: random.Random) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(0.015 * min(image.size) * rng.uniform(0.8, 1.2)))


def jpeg(image: Image.Image, rng: random.Random) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=15)
    buffer.seek(0)
    return Image.open(buffer).convert("RGB")


def background(image: Image.Image, rng: random.Random) -> Image.Image:
    """The middle of the image, cropped, somewhere on a background of nearly one color."""
    side = min(image.size)
    crop = ImageOps.fit(image, (round(0.7 * side), round(0.7 * side)))
    shade = rng.uniform(0.9, 1.1)
    result = Image.new("RGB", (side, side), tuple(round(shade * part) for part in GREEN))
    free = side - crop.width
    low, high = free // 5, free - free // 5
    result.paste(crop, (rng.randint(low, high), rng.randint(low, high)))
    return result


def watermark(image: Image.Image, rng: random.Random) -> Image.Image:
    """Stripes like letters at the lower left."""
    width, height = round(0.3 * image.width), round(0.14 * image.height)
    mark = np.full((24, 60, 3), 255, dtype=np.uint8)
    for left, shade in zip(range(4, 56, 9), (20, 90, 20, 150, 20, 90), strict=True):
        mark[4:20, left : left + 5] = (shade, shade // 2, 120)
    result = image.copy()
    place = (round(0.06 * image.width), round(0.8 * image.height))
    result.paste(Image.fromarray(mark).resize((width, height)), place)
    return result


#: mark -> how it is made, and the properties that name it
PLANTS = {
    "frame": (frame, ("frame", "edge")),
    "dark": (dark, ("brightness",)),
    "logo": (logo, ("mark",)),
    "gray": (gray, ("saturation",)),
    "blur": (blur, ("sharpness",)),
    "jpeg": (jpeg, ("compression",)),
    "background": (background, ("frame", "mark", "edge")),
    "watermark": (watermark, ("mark",)),
}


def plant(name: str, images: list[Image.Image], seed: int = 1) -> list[Image.Image]:
    """The images with a mark; the watermark comes on every other image."""
    make, rng = PLANTS[name][0], random.Random(seed)
    step = 2 if name == "watermark" else 1
    return [make(image, rng) if place % step == 0 else image for place, image in enumerate(images)]
