"""Models that squash images are given squashed images, everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import tiny_clip

from dear.clip import ClipConfig
from dear.images.views import View, normalize, square


def noise(width: int = 90, height: int = 40) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("bilinear", [True, False])
def test_squash_is_one_resize_of_both_sides(bilinear: bool) -> None:
    filtered = Image.Resampling.BILINEAR if bilinear else Image.Resampling.BICUBIC
    expected = np.asarray(noise().resize((24, 24), filtered)).astype(int)
    got = np.asarray(square(noise(), View(24, squash=True, bilinear=bilinear)))
    assert np.abs(got - expected).max() <= 1
    assert np.abs(np.asarray(square(noise(), 24)) - expected).max() > 1


def test_a_backbone_says_how_it_sees() -> None:
    assert ClipConfig.named("ViT-B-16").view == 224
    assert ClipConfig.named("ViT-B-16-SigLIP").view == View(224, squash=True)
    assert ClipConfig.named("PE-Core-B-16").view == View(224, squash=True, bilinear=True)


def test_training_evaluation_and_single_images_see_the_same(tmp_path) -> None:
    from dataclasses import replace

    from dear.data import open_data
    from dear.data.batches import image_set, over_pixels, pixels_for
    from dear.runs.recipe import Recipe
    from dear.train.feed import Feed

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        noise().save(tmp_path / name / "1.png")
    clip = tiny_clip(dtype=torch.float32)
    clip.config = replace(clip.config, resize="squash", interpolation="bilinear")
    images = open_data(tmp_path, "all")
    expected = np.asarray(square(noise(), View(24, squash=True, bilinear=True)))
    pixels = normalize(torch.from_numpy(expected.copy()).permute(2, 0, 1), clip.config.mean, clip.config.std)
    torch.testing.assert_close(clip.preprocess(noise()), pixels)
    torch.testing.assert_close(pixels_for(clip, image_set([noise()]), [0])[0], pixels)
    torch.testing.assert_close(Feed(images, clip, Recipe(batch=2)).batch([0], None).pixels[0], pixels)
    ((first, _),), _ = over_pixels(images, lambda batch: batch, clip, batch=2)
    torch.testing.assert_close(first, pixels)
