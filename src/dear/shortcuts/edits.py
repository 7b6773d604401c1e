"""Edits that change one property of an image: at random, or to the value of another image.

`random_edit` returns varied copies for training and for finding directions of the feature. `transfer` copies
the property of a donor: from a donor of the class it adds the property, from a donor of another class it
removes it.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from dear.errors import UsageError
from dear.shortcuts.marks import Mask
from dear.shortcuts.properties import (
    FINE,
    SIDE,
    Floats,
    blockiness,
    corner_region,
    laplacian,
    properties_of,
    property_column,
)

EDGE_SHARE = 0.08  #: of a side, for edges that go from image to image
_SHADES = (-0.6, -0.4, -0.2, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # relative darkness of corners
_QUALITIES = (75, 50, 35, 25, 20, 15, 10, 6)
_RADII = (0.002, 0.004, 0.007, 0.01, 0.015, 0.02, 0.03, 0.045)  # of the short side


def random_edit(kind: str, image: Image.Image, rng: random.Random) -> Image.Image:
    """A copy of an image (RGB) with a property of this kind changed at random."""
    if kind not in _RANDOM_EDITS:
        raise UsageError(f"kind must be one of {', '.join(sorted(_RANDOM_EDITS))}, got {kind!r}")
    return _RANDOM_EDITS[kind](image, rng)


def transfer(
    kind: str, image: Image.Image, donor: Image.Image, mask: Mask | None = None, name: str | None = None
) -> Image.Image:
    """A copy of an image (RGB) with the property of a donor (RGB).

    `mask` [32, 32] is the place of a mark or frame, `name` the property if there are several of one kind
    ("red", "blue").
    """
    if kind in ("mark", "frame") and mask is not None:
        return _paste(image, donor, mask)
    if kind in ("edge", "frame"):
        ring = np.ones((FINE, FINE), dtype=bool)
        width = round(EDGE_SHARE * FINE)
        ring[width:-width, width:-width] = False
        return _paste(image, donor, ring, grow=False)
    if kind == "mark" and name is not None and name.startswith("spot "):
        region = np.zeros((FINE, FINE), dtype=bool)
        region[corner_region(name.removeprefix("spot "), FINE)] = True
        return _paste(image, donor, region, grow=False)
    if kind == "mark":
        raise UsageError("mask must be the place of the mark to transfer it, got None")
    if kind not in _TRANSFERS:
        raise UsageError(f"kind must be one of {', '.join(sorted(_RANDOM_EDITS))}, got {kind!r}")
    return _TRANSFERS[kind](image, donor, name or kind)


def can_remove(kind: str) -> bool:
    """Whether a transfer from an image without the property removes it: lost detail cannot be restored."""
    return kind not in ("sharpness", "compression", "size", "saturation")


def _value(image: Image.Image, name: str) -> float:
    return float(properties_of(image)[property_column(name)])


def _paste(image: Image.Image, donor: Image.Image, mask: Mask, grow: bool = True) -> Image.Image:
    """The image with the donor's pixels inside the mask."""
    shape = Image.fromarray(mask.astype(np.uint8) * 255)
    if grow:  # the mark's border lies inside neighboring pixels of the small copy
        shape = shape.filter(ImageFilter.MaxFilter(3))
    shape = shape.resize(image.size, Image.Resampling.NEAREST)
    return Image.composite(donor.resize(image.size, Image.Resampling.BICUBIC), image, shape)


def _ratio(image: Image.Image, donor: Image.Image, name: str, minimum: float = 0.1) -> float:
    """The donor's value of a property relative to the image's, clipped to [minimum, 5]."""
    return float(np.clip(_value(donor, name) / max(_value(image, name), 1.0), minimum, 5.0))


def _brightness(image: Image.Image, donor: Image.Image, name: str) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(_ratio(image, donor, name))


def _contrast(image: Image.Image, donor: Image.Image, name: str) -> Image.Image:
    pixels = np.asarray(image, dtype=np.float64)
    if name == "darkest pixels":
        target, current, high = _value(donor, name), _value(image, name), _value(image, "brightest pixels")
        scale = np.clip((high - target) / max(high - current, 1.0), 0.1, 5.0)
        return _image(high - (high - pixels) * scale)
    return _image(pixels.mean() + (pixels - pixels.mean()) * _ratio(image, donor, "contrast"))


def _saturation(image: Image.Image, donor: Image.Image, name: str) -> Image.Image:
    return ImageEnhance.Color(image).enhance(_ratio(image, donor, "saturation", 0.0))


def _cast(image: Image.Image, donor: Image.Image, name: str) -> Image.Image:
    if name.endswith("tint"):
        return _tint(image, donor)
    names = ("red", "blue") if name == "cast" else (name,)
    pixels = np.asarray(image, dtype=np.float64).copy()
    for color in names:  # the other two channels change the opposite way, so that brightness is the same
        channel, step = {"red": 0, "blue": 2}[color], _value(donor, color) - _value(image, color)
        pixels[..., channel] += step
        pixels[..., [part for part in range(3) if part != channel]] -= step / 2
    return _image(pixels)


def _tint(image: Image.Image, donor: Image.Image) -> Image.Image:
    """The image with the donor's tint of blacks and whites, at the same brightness."""
    (low, high), (target_low, target_high) = _levels(image), _levels(donor)
    low_to = low.mean() + target_low - target_low.mean()
    high_to = high.mean() + target_high - target_high.mean()
    low_to, high_to = low_to - min(0.0, low_to.min()), high_to - max(0.0, high_to.max() - 255)  # not clipped
    pixels = np.asarray(image, dtype=np.float64)
    return _image(low_to + (pixels - low) * (high_to - low_to) / np.maximum(high - low, 1.0))


def _levels(image: Image.Image) -> tuple[Floats, Floats]:
    """First and last percentile of each color, [3]."""
    # [SIDE, SIDE, 3] -> [SIDE * SIDE, 3]
    low, high = np.percentile(np.asarray(image.resize((SIDE, SIDE))).reshape(-1, 3), (1, 99), axis=0)
    return low, high


def _vignette(image: Image.Image, donor: Image.Image, name: str) -> Image.Image:
    target = _value(donor, "vignette")
    candidates = (image, *(shade_corners(image, strength) for strength in _SHADES))
    return min(candidates, key=lambda candidate: abs(_value(candidate, "vignette") - target))


def shade_corners(image: Image.Image, strength: float) -> Image.Image:
    """The image with corners darkened by a fraction `strength`, or brightened if it is negative."""
    y, x = (np.linspace(-1, 1, size) ** 2 for size in (image.height, image.width))
    gain = 1 - strength * (y[:, None] + x[None, :]) / 2
    return _image(np.asarray(image, dtype=np.float64) * gain[..., None])


def _sharpness(image: Image.Image, donor: Image.Image, name: str) -> Image.Image:
    target = _value(donor, "sharpness")

    def distance(candidate: Image.Image) -> float:
        small = np.asarray(candidate.convert("L").resize((FINE, FINE)), dtype=np.float64)
        return abs(float(np.log(laplacian(small).var() + 1e-3)) - target)

    if target >= _value(image, "sharpness"):
        return min((image, image.filter(ImageFilter.UnsharpMask(2, 150))), key=distance)
    blurred = [image.filter(ImageFilter.GaussianBlur(part * min(image.size))) for part in _RADII]
    return min((image, *blurred), key=distance)


def _compression(image: Image.Image, donor: Image.Image, name: str) -> Image.Image:
    target = blockiness(donor)
    candidates = (image, *(recompress(image, quality) for quality in _QUALITIES))
    return min(candidates, key=lambda candidate: abs(blockiness(candidate) - target))


def _aspect(image: Image.Image, donor: Image.Image, name: str) -> Image.Image:
    target = donor.width / donor.height
    width, height = image.size
    if width / height > target:
        width = max(1, round(height * target))
    else:
        height = max(1, round(width / target))
    return ImageOps.fit(image, (width, height))


def _size(image: Image.Image, donor: Image.Image, name: str) -> Image.Image:
    scale = donor.width / image.width
    return image.resize((donor.width, max(1, round(image.height * scale))), Image.Resampling.BICUBIC)


def recompress(image: Image.Image, quality: int) -> Image.Image:
    """The image after JPEG compression with this quality."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    with Image.open(buffer) as file:
        return file.convert("RGB")


def _image(pixels: Floats) -> Image.Image:
    return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))


def _color(rng: random.Random) -> tuple[int, int, int]:
    if rng.random() < 0.5:  # frames are mostly black, white or gray
        return (rng.choice((0, 128, 255)),) * 3
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def _shrink(image: Image.Image, scale: float) -> Image.Image:
    return image.resize((max(1, round(scale * image.width)), max(1, round(scale * image.height))))


def _random_frame(image: Image.Image, rng: random.Random) -> Image.Image:
    """The image scaled down on a plain color (a frame or a background), or rotated."""
    color = _color(rng)
    if rng.random() < 0.3:
        return image.rotate(rng.uniform(-25, 25), Image.Resampling.BILINEAR, fillcolor=color)
    inner = _shrink(image, rng.uniform(0.65, 0.96))
    free = (image.width - inner.width, image.height - inner.height)
    place = (free[0] // 2, free[1] // 2)
    if rng.random() < 0.5:
        place = (rng.randint(0, free[0]), rng.randint(0, free[1]))
    result = Image.new("RGB", image.size, color)
    result.paste(inner, place)
    return result


def _random_mark(image: Image.Image, rng: random.Random) -> Image.Image:
    """A rectangle in a corner or elsewhere, plain or patterned."""
    size = tuple(max(1, round(rng.uniform(0.1, 0.35) * side)) for side in image.size)
    free = (image.width - size[0], image.height - size[1])
    corner = (rng.choice((0, free[0])), rng.choice((0, free[1])))
    place = corner if rng.random() < 0.7 else (rng.randint(0, free[0]), rng.randint(0, free[1]))
    patch = Image.new("RGB", (rng.randint(1, 6), rng.randint(1, 4)))
    patch.putdata([_color(rng) for _ in range(patch.width * patch.height)])
    result = image.copy()
    result.paste(patch.resize((size[0], size[1]), Image.Resampling.NEAREST), place)
    return result


def _random_crop(image: Image.Image, rng: random.Random) -> Image.Image:
    width, height = (max(1, round(rng.uniform(0.5, 1.0) * side)) for side in image.size)
    left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
    return image.crop((left, top, left + width, top + height))


def _random_size(image: Image.Image, rng: random.Random) -> Image.Image:
    return _shrink(image, rng.uniform(0.2, 0.8)).resize(image.size, Image.Resampling.BICUBIC)


_RANDOM_EDITS: dict[str, Callable[[Image.Image, random.Random], Image.Image]] = {
    "brightness": lambda image, rng: ImageEnhance.Brightness(image).enhance(rng.uniform(0.35, 1.4)),
    "contrast": lambda image, rng: ImageEnhance.Contrast(image).enhance(rng.uniform(0.3, 1.5)),
    "saturation": lambda image, rng: ImageEnhance.Color(image).enhance(rng.choice((0.0, rng.random()))),
    "cast": lambda image, rng: _image(
        np.asarray(image, dtype=np.float64) + [rng.uniform(-50, 50) for _ in range(3)]
    ),
    "vignette": lambda image, rng: shade_corners(image, rng.uniform(-0.4, 0.7)),
    "sharpness": lambda image, rng: image.filter(
        ImageFilter.GaussianBlur(rng.uniform(0.005, 0.03) * min(image.size))
    ),
    "edge": _random_frame,
    "frame": _random_frame,
    "mark": _random_mark,
    "compression": lambda image, rng: recompress(image, rng.randint(6, 50)),
    "size": _random_size,
    "aspect": _random_crop,
}
_TRANSFERS: dict[str, Callable[[Image.Image, Image.Image, str], Image.Image]] = {
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
    "cast": _cast,
    "vignette": _vignette,
    "sharpness": _sharpness,
    "compression": _compression,
    "size": _size,
    "aspect": _aspect,
}
KINDS = tuple(_RANDOM_EDITS)  #: all kinds of edits, which `--without` accepts in addition to concepts
