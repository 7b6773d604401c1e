"""What was done to one class is found and named; clean classes raise no alarm."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont, ImageOps
from sklearn.metrics import roc_auc_score

from dear.data.images import ListedImages
from dear.errors import UsageError
from dear.shortcuts.edits import recompress, shade_corners
from dear.shortcuts.find import auc, find_shortcuts, limit_for, search_properties
from dear.shortcuts.marks import place_of
from dear.shortcuts.metadata import FileMetadata
from dear.shortcuts.properties import ImageMeasurements, measure_properties
from dear.shortcuts.without import Without


def planted(photos: ListedImages, label: int, change: Callable[[Image.Image], Image.Image], step: int = 1):
    items = []
    for index, image_label in enumerate(photos.labels.tolist()):
        image = photos.image(index)
        items.append(change(image) if image_label == label and index % step == 0 else image)
    return ListedImages(tuple(items), photos.labels, photos.classes)


def framed(image: Image.Image) -> Image.Image:
    return ImageOps.expand(image, 10, (20, 40, 230))


def logo(image: Image.Image) -> Image.Image:
    badge = Image.new("RGB", (2, 2), (255, 255, 255))
    badge.putpixel((0, 0), (220, 0, 0))
    badge.putpixel((1, 1), (0, 0, 0))
    result = image.copy()
    side = (image.width // 4, image.height // 4)
    result.paste(badge.resize(side, Image.Resampling.NEAREST), (image.width - side[0], 0))
    return result


def stamped(image: Image.Image) -> Image.Image:
    """Orange digits that differ from image to image."""
    result = image.copy()
    text = str(zlib.crc32(image.tobytes()))[:6]
    place = (round(0.7 * image.width), round(0.89 * image.height))
    font = ImageFont.load_default(size=max(9, round(0.08 * image.height)))
    ImageDraw.Draw(result).text(place, text, fill=(255, 140, 30), font=font)
    return result


PLANTS = {
    "frame": (framed, "frame", "blue frame"),
    "dark": (lambda image: ImageEnhance.Brightness(image).enhance(0.3), "brightness", "dark"),
    "gray": (lambda image: image.convert("L").convert("RGB"), "saturation", "gray"),
    "blur": (lambda image: image.filter(ImageFilter.GaussianBlur(3)), "sharpness", "blurred"),
    "jpeg": (lambda image: recompress(image, 10), "compression", "with compression blocks"),
    "logo": (logo, "mark", "top right"),
    "wide": (lambda image: ImageOps.fit(image, (200, 80)), "aspect", "wide"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mark_is_found_and_named(photos: ListedImages, name: str) -> None:
    change, kind, look = PLANTS[name]
    images = planted(photos, 2, change)
    (shortcut,) = find_shortcuts(measure_properties(images), images.labels.tolist(), images.classes)
    assert (shortcut.class_name, shortcut.kind) == ("cat", kind)
    assert look in shortcut.look
    assert shortcut.score > 0.95
    assert "cat" in shortcut.sentence


FAINT_PLANTS = {
    "black tint": lambda image: Image.blend(image, Image.new("RGB", image.size, (255, 140, 0)), 0.18),
    "green black tint": lambda image: Image.blend(image, Image.new("RGB", image.size, (0, 160, 90)), 0.12),
    "white tint": lambda image: image.convert("RGB", matrix=(1.08, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0.8, 0)),
    "vignette": lambda image: shade_corners(image, 0.6),
    "brightest corner": lambda image: image.rotate(3, Image.Resampling.BICUBIC),
    "spot bottom right": stamped,
}


@pytest.mark.parametrize("name", FAINT_PLANTS)
def test_a_faint_mark_is_found_in_images_with_neutral_and_smooth_parts(
    scenes: ListedImages, name: str
) -> None:
    images = planted(scenes, 2, FAINT_PLANTS[name])
    (shortcut,) = find_shortcuts(measure_properties(images), images.labels.tolist(), images.classes)
    assert shortcut.class_name == "cat"
    assert name in (shortcut.name, *shortcut.also)
    assert not [name for name in ("black tint", "white tint", "gray tint") if name in shortcut.sentence]
    if shortcut.kind == "cast":
        assert name not in shortcut.sentence  # a measure of the search
        assert "color cast alone" in shortcut.sentence
        assert Without.of(shortcut.title).concepts == ("cast",)


def test_clean_scenes_raise_no_alarm(scenes: ListedImages) -> None:
    assert not find_shortcuts(measure_properties(scenes), scenes.labels.tolist(), scenes.classes)


def test_the_closest_property_below_the_limit_is_reported(photos: ListedImages) -> None:
    images = planted(photos, 1, lambda image: ImageEnhance.Brightness(image).enhance(0.7))
    search = search_properties(measure_properties(images), images.labels.tolist(), images.classes)
    assert not search.shortcuts
    assert search.closest is not None
    assert search.closest.class_name == "bee"
    assert search.closest_limit - 0.1 < search.closest.score < search.closest_limit


def test_a_mark_on_half_of_the_images_is_found(photos: ListedImages) -> None:
    images = planted(photos, 4, logo, step=2)
    (shortcut,) = find_shortcuts(measure_properties(images), images.labels.tolist(), images.classes)
    assert (shortcut.class_name, shortcut.kind) == ("elk", "mark")
    assert shortcut.mark is not None
    assert shortcut.mark.place == "top right"
    assert 0.3 <= shortcut.mark.share <= 0.5


def test_clean_draws_raise_no_alarm(photos: ListedImages) -> None:
    measured, rng = measure_properties(photos), np.random.default_rng(0)
    alarms = sum(
        bool(find_shortcuts(measured, rng.permutation(photos.labels.numpy()).tolist(), photos.classes))
        for _ in range(40)
    )
    assert alarms <= 2


def test_the_area_is_that_of_sklearn() -> None:
    rng = np.random.default_rng(3)
    members, values = rng.random(60) < 0.3, rng.integers(0, 9, 60).astype(float)
    assert auc(values, members) == pytest.approx(roc_auc_score(members, values))


def test_few_images_or_classes_raise_the_limit(photos: ListedImages) -> None:
    assert limit_for(7, 10) > 1
    assert 0.95 < limit_for(10, 10) < 1
    assert limit_for(16, 5) == 0.95 < limit_for(100, 2)
    dark = planted(photos, 0, PLANTS["dark"][0])
    few = dark.subset([*range(7), *range(20, 120)])
    assert not find_shortcuts(measure_properties(few), few.labels.tolist(), few.classes)


def test_facts_of_files_tell_a_class(photos: ListedImages) -> None:
    measured, labels = measure_properties(photos), photos.labels.tolist()
    plain, other = FileMetadata(0.5, "JPEG", "A 1", "aaaa", 90), FileMetadata(0.5, "JPEG", "B 2", "aaaa", 90)
    files = tuple(other if label == 1 else plain for label in labels)
    (shortcut,) = find_shortcuts(
        ImageMeasurements(measured.values, measured.small, measured.hashes, files), labels, photos.classes
    )
    assert (shortcut.class_name, shortcut.name, shortcut.kind) == ("bee", "camera", "")
    assert "B 2" in shortcut.look


def test_one_class_or_missing_labels_are_refused(photos: ListedImages) -> None:
    measured = measure_properties(photos.subset(range(10)))
    with pytest.raises(UsageError, match=r"\b1\b"):
        find_shortcuts(measured, [0] * 10, ("ant", "bee"))
    with pytest.raises(UsageError, match=r"\b2\b.*\b10\b|\b10\b.*\b2\b"):
        find_shortcuts(measured, [0, 1], ("ant", "bee"))


def test_places_in_words() -> None:
    mask = np.zeros((32, 32), dtype=bool)
    mask[:2], mask[-2:], mask[:, :2], mask[:, -2:] = True, True, True, True
    assert place_of(mask) == "frame"
    corners = np.zeros_like(mask)
    corners[:3, :3], corners[-3:, -3:], corners[:3, -3:], corners[-3:, :3] = True, True, True, True
    assert place_of(corners) == "corners"
    low = np.zeros_like(mask)
    low[26:31, 12:20] = True
    assert place_of(low) == "bottom center"
