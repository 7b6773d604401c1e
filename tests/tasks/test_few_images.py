"""Few and unbalanced images: enough steps, equal classes, and a sentence before the work."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import Colors, mixed_roles, tiny_clip

import dear
from dear import world
from dear.runs.recipe import Recipe
from dear.runs.spec import Spec
from dear.train.setup.balance import LEAST_STEPS, MOST_REPEATS, balanced_rows, counts, enough_steps
from dear.train.setup.notices import (
    PHOTO_FALLOFF,
    backbone_notices,
    image_notices,
    spectral_falloff,
    split_notices,
    unknown_classes,
)
from dear.train.setup.prepare import prepare

CLIP = tiny_clip(dtype=torch.float32)


def unequal(*number: int) -> Colors:
    """The first `number[c]` images of each class."""
    images = Colors(classes=len(number), each=max(number))
    each = max(number)
    return images.subset([c * each + i for c, n in enumerate(number) for i in range(n)])


def test_unused_validation_images_are_said(tmp_path: Path) -> None:
    for side, split in ((8, "train"), (9, "test"), (10, "val")):
        for name in ("red", "blue"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (side, side), name).save(tmp_path / split / name / "0.png")
    (said,) = split_notices(str(tmp_path))
    assert "2 validation images" in said
    shutil.rmtree(tmp_path / "test")  # without test images they are tested on
    assert split_notices(str(tmp_path)) == []
    assert split_notices("world:textures") == []


def test_rare_classes_are_repeated_evenly() -> None:
    images = unequal(16, 4, 1)
    found = images.subset(balanced_rows(images.labels))
    assert counts(found) == [16, 16, 16]
    shown = Counter(tuple(found.data[i].flatten()[:5].tolist()) for i in range(len(found)))
    assert sorted(shown.values()) == [1] * 16 + [4] * 4 + [16]
    assert balanced_rows(unequal(5, 4, 3).labels) == list(range(12))


def test_repeats_are_limited() -> None:
    labels = unequal(100, 2).labels
    assert int((labels[balanced_rows(labels)] == 1).sum()) == 2 * MOST_REPEATS


def test_small_sets_are_trained_long_enough() -> None:
    for images in (3, 30, 300, 3000):
        recipe = enough_steps(Recipe(epochs=10, batch=16), images)
        assert recipe.epochs * -(-images // 16) >= LEAST_STEPS
    assert enough_steps(Recipe(), 3000) == Recipe()


def test_a_plan_balances_and_lengthens_unless_told_otherwise() -> None:
    images = unequal(8, 2, 2)
    plan = prepare(Spec(), images, clip=CLIP, roles=mixed_roles())
    assert (len(plan.images), len(plan.rows)) == (12, 24)
    assert plan.steps >= LEAST_STEPS
    spec = Spec(balance=False, recipe={"epochs": 3, "batch": 16})
    plain = prepare(spec, images, clip=CLIP, roles=mixed_roles())
    assert (len(plain.rows), plain.recipe.epochs, plain.steps) == (12, 3, 3)
    text = " / ".join(plan.notices)
    assert "2 of 3 classes" in text
    assert "'green' has 2" in text
    assert "between 2 and 8 images" in text
    assert plan.notices != plain.notices


def test_enough_equal_images_need_no_word() -> None:
    assert image_notices(unequal(6, 6, 6), True) == []


def test_the_embedded_backbone_knows_its_own_words() -> None:
    mini = dear.load("mini")
    assert unknown_classes(mini, ["red circle", "lasagna", "ramen soup"]) == ["lasagna", "ramen soup"]
    assert unknown_classes(CLIP, ["lasagna"]) == []
    photos = Colors()
    photos.classes = ("lasagna", "green", "blue")
    said = backbone_notices(mini, photos)
    assert "1 of 3 classes ('lasagna')" in said[0]
    assert "openai/clip-vit-base-patch16" in said[0]
    assert backbone_notices(CLIP, photos) == []
    assert backbone_notices(mini, dear.open_data("world:textures", "test")) == []


def as_files(folder: Path, images: list[Image.Image]) -> Path:
    """Half of the images as class `cat`, half as class `dog`: words that `mini` knows."""
    for place, image in enumerate(images):
        kind = folder / ("cat" if place % 2 else "dog")
        kind.mkdir(parents=True, exist_ok=True)
        image.save(kind / f"{place}.jpg", quality=95)
    return folder


def like_a_photo(generator: np.random.Generator, power: float) -> Image.Image:
    """A random image whose spectrum falls with the frequency as that of photographs does."""
    waves = np.fft.fftfreq(256)
    distance = np.hypot(waves[:, None], waves[None])
    distance[0, 0] = 1.0
    field = np.fft.ifft2(np.fft.fft2(generator.normal(size=(256, 256))) / distance ** (power / 2)).real
    gray = (255 * (field - field.min()) / np.ptp(field)).astype(np.uint8)
    return Image.fromarray(gray).convert("RGB")


def test_photographs_are_seen_in_the_pixels(tmp_path: Path) -> None:
    """Where all class names are known words, the images alone tell."""
    mini, generator = dear.load("mini"), np.random.default_rng(0)
    photos = as_files(tmp_path / "photos", [like_a_photo(generator, 2.3) for _ in range(12)])
    said = backbone_notices(mini, dear.open_data(photos, "all"))
    assert len(said) == 1
    assert " classes (" not in said[0]
    for seed in range(3):
        scenes = world.sample(32, torch.Generator().manual_seed(seed))
        drawn = world.render(scenes).permute(0, 2, 3, 1).numpy()
        files = as_files(tmp_path / f"drawn {seed}", [Image.fromarray(image) for image in drawn])
        assert backbone_notices(mini, dear.open_data(files, "all")) == []


def test_most_tasks_of_the_world_would_pass_as_files() -> None:
    """`textures` is the exception: its look of woven fabric has no finest details."""
    names = ("emblems", "vehicles", "scenes", "fauna", "mixed", "domains")
    found = {name: spectral_falloff(dear.open_data(f"world:{name}", "test")) for name in names}
    assert max(found.values()) < PHOTO_FALLOFF


@pytest.mark.parametrize("counts_of", [(8, 1, 1)])
def test_balance_helps_rare_classes(counts_of: tuple[int, ...]) -> None:
    """With repetition the rare classes' share of the training loss is that of the large one."""
    images = unequal(*counts_of)
    plan = prepare(Spec(method="linear-probe"), images, clip=CLIP)
    share = torch.bincount(plan.images.labels[plan.rows]).double() / len(plan.rows)
    torch.testing.assert_close(share, torch.full((3,), 1 / 3, dtype=torch.float64))
