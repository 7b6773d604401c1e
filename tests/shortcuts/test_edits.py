"""Edits change what they name; causal tests count what a model does; directions are those of the edit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from dear.data.images import ListedImages
from dear.errors import UsageError
from dear.shortcuts.causal import causal_test, edit_held_out
from dear.shortcuts.directions import edit_directions, random_directions
from dear.shortcuts.edits import KINDS, random_edit, shade_corners, transfer
from dear.shortcuts.find import Shortcut
from dear.shortcuts.properties import properties_of, property_column


def value(image: Image.Image, name: str) -> float:
    return float(properties_of(image)[property_column(name)])


@pytest.mark.parametrize("kind", KINDS)
def test_random_edits_change_the_image_and_repeat(photos: ListedImages, kind: str) -> None:
    image = photos.image(1)
    copy = image.copy()
    first, again = (random_edit(kind, image, random.Random(3)) for _ in range(2))
    assert first.mode == "RGB"
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != image.tobytes()
    assert image.tobytes() == copy.tobytes()


def test_an_unknown_edit_is_refused(photos: ListedImages) -> None:
    with pytest.raises(UsageError, match="brightness"):
        random_edit("smell", photos.image(0), random.Random(0))
    with pytest.raises(UsageError, match="mask"):
        transfer("mark", photos.image(0), photos.image(1))


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("brightness", "brightness", lambda image: ImageEnhance.Brightness(image).enhance(0.4)),
        ("contrast", "contrast", lambda image: ImageEnhance.Contrast(image).enhance(0.4)),
        ("saturation", "saturation", lambda image: ImageEnhance.Color(image).enhance(0.2)),
        ("aspect", "aspect", lambda image: image.resize((300, 100))),
        ("size", "width", lambda image: image.resize((60, 60))),
        ("compression", "blocks", lambda image: random_edit("compression", image, random.Random(1))),
        ("sharpness", "sharpness", lambda image: random_edit("sharpness", image, random.Random(1))),
        ("cast", "red", lambda image: image.convert("RGB", matrix=(0.4, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0))),
    ],
)  # fmt: skip
def test_a_transfer_brings_the_donors_value(photos: ListedImages, kind, name, change) -> None:
    image, donor = photos.image(1), change(photos.image(2))
    before, target = value(image, name), value(donor, name)
    after = value(transfer(kind, image, donor, name=name), name)
    assert abs(after - target) < 0.35 * abs(before - target)


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("cast", "black tint", lambda image: Image.blend(image, Image.new("RGB", image.size, "orange"), 0.2)),
        ("cast", "white tint", lambda image: Image.blend(image, Image.new("RGB", image.size, "orange"), 0.2)),
        ("vignette", "vignette", lambda image: shade_corners(image, 0.6)),
    ],
)
def test_a_transfer_of_faint_marks(scenes: ListedImages, kind, name, change) -> None:
    image, donor = scenes.image(1), change(scenes.image(2))
    before, target = value(image, name), value(donor, name)
    after = value(transfer(kind, image, donor, name=name), name)
    assert abs(after - target) < 0.35 * abs(before - target)


def test_a_spot_is_transferred_with_its_corner_alone(photos: ListedImages) -> None:
    image, donor = photos.image(1), photos.image(2)
    edited = np.asarray(transfer("mark", image, donor, name="spot bottom right"), dtype=int)
    changed = np.abs(edited - np.asarray(image, dtype=int)).sum(axis=2) > 0
    rows, columns = np.nonzero(changed)
    assert rows.min() >= 0.8 * image.height
    assert columns.min() >= 0.7 * image.width


def test_a_mark_goes_where_it_was_and_nowhere_else(photos: ListedImages) -> None:
    image, donor = photos.image(1), Image.new("RGB", (64, 64), (255, 0, 0))
    mask = np.zeros((32, 32), dtype=bool)
    mask[:8, :8] = True
    pixels = np.asarray(transfer("mark", image, donor, mask).resize(image.size))
    original = np.asarray(image)
    assert (pixels[: image.height // 5, : image.width // 5] == (255, 0, 0)).all()
    assert (pixels[image.height // 2 :] == original[image.height // 2 :]).all()


def test_a_model_that_answers_by_light_is_found_out(photos: ListedImages) -> None:
    dark = [ImageEnhance.Brightness(photos.image(place)).enhance(0.2) for place in range(20)]
    training = ListedImages(
        (*dark, *(photos.image(place) for place in range(20, 120))), photos.labels, photos.classes
    )
    shortcut = Shortcut(0, "ant", "brightness", "brightness", 1.0, "dark")

    def by_light(images) -> np.ndarray:
        return np.array([0 if value(image, "brightness") < 40 else 1 for image in images])

    def by_nothing(images) -> np.ndarray:
        return np.arange(len(images)) % 6

    edited = edit_held_out(shortcut, photos, training, images=40)
    result = causal_test(edited, by_light)
    assert (result.plain, result.images) == (0.0, 40)
    assert result.edited > 0.9
    assert result.relies
    assert -1 <= result.interval[0] <= result.interval[1] <= 1
    unmoved = causal_test(edited, by_nothing)
    assert unmoved.extra == 0
    assert not unmoved.relies
    assert "ant" in result.sentence


def test_facts_of_files_cannot_be_edited(photos: ListedImages) -> None:
    with pytest.raises(UsageError, match="camera"):
        edit_held_out(Shortcut(0, "ant", "camera", "", 1.0, "x"), photos, photos)


def test_directions_are_those_of_the_edit() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50, 12, generator=generator)
    step = torch.zeros(12)
    step[3] = 1.0
    directions = edit_directions(features, features + step * torch.rand(50, 1, generator=generator), 1)
    assert abs(float(directions[0, 3])) == pytest.approx(1.0, abs=1e-6)
    drawn = random_directions(12, 2, seed=5)
    assert torch.allclose(drawn @ drawn.T, torch.eye(2, dtype=torch.float64), atol=1e-9)
    with pytest.raises(UsageError, match="direction"):
        edit_directions(features, features)
