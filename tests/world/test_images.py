"""The renderer: the same images always, and every factor visible in them."""

from __future__ import annotations

import hashlib

import pytest
import torch

from dear import world
from dear.world import factors as F
from dear.world.atlas import LAYERS, sprites
from dear.world.exact import rotation, wave
from dear.world.renderer import compose
from dear.world.scenes import Scenes

# Rendering uses only operations that IEEE 754 rounds correctly, so these hold on every CPU, with any number
# of threads and any version of torch whose CPU generator is the Mersenne twister (checked with torch's
# unvectorized, AVX2 and AVX-512 kernels). A change of the images on purpose changes them.
SCENES_SHA = "c00199d699f07f5be13ed92d870e7fbf9d67b7584093acce9b2274e9139db21e"
IMAGES_SHA = "63772bcd3240285be47e0ce5ca1fd6c9168d4bda679b811016d5fd29eb085975"


def draw(number: int, seed: int, **values: int) -> Scenes:
    scenes = world.sample(number, torch.Generator().manual_seed(seed), avoid_held_out=False)
    full = {"style": F.PHOTO, "count": 1, **values}
    return scenes.replace(**{name: torch.full((number,), value) for name, value in full.items()})


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def test_same_seed_same_images_today_and_tomorrow() -> None:
    scenes = world.sample(512, torch.Generator().manual_seed(2024))
    assert sha(torch.cat([scenes.factors().float(), scenes.nuisance], 1)) == SCENES_SHA
    assert sha(world.render(scenes)) == IMAGES_SHA


def test_a_image_does_not_depend_on_its_batch_or_on_threads() -> None:
    scenes = world.sample(150, torch.Generator().manual_seed(3))
    whole = world.render(scenes)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    assert torch.equal(world.render(scenes[order]), whole[order])
    assert torch.equal(torch.cat([world.render(scenes[i : i + 1]) for i in range(20)]), whole[:20])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(world.render(scenes), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("factor", ["color", "texture", "place", "style", "count"])
def test_every_value_of_a_factor_shows(factor: str) -> None:
    """Scenes that differ in one factor only differ clearly in their images, for every pair of values."""
    sizes = {"color": 12, "texture": 12, "place": 12, "style": 8, "count": 5}
    first = 1 if factor == "count" else 0
    scenes = draw(8, 5, subject=F.subject_id("circle"), color=F.color_id("teal"), place=0)
    values = range(first, first + sizes[factor])
    images = [world.render(scenes.replace(**{factor: torch.full((8,), value)})).float() for value in values]
    for i, one in enumerate(images):
        for other in images[i + 1 :]:
            changed = (one - other).abs().amax(1) > 24  # [8, 64, 64]
            assert changed.float().mean(dim=(1, 2)).min() > 0.015


def test_every_subject_shows_and_none_looks_like_another() -> None:
    number = len(F.SUBJECT_NAMES)
    scenes = draw(1, 7, subject=0, color=F.color_id("red"), texture=F.PLAIN, place=0)
    scenes = scenes[torch.zeros(number, dtype=torch.long)].replace(subject=torch.arange(number))
    images = world.render(scenes).float()
    distance = (images[:, None] - images[None]).abs().amax(2).gt(24).float().mean((-2, -1))
    distance.fill_diagonal_(1.0)
    assert distance.min() > 0.006
    assert len(sprites()) == number
    # Every sprite keeps inside the table's reach, so that none is cut off.
    far = torch.tensor([[-1.15, 0.0], [1.15, 0.0], [0.0, -1.15], [0.0, 1.15]], dtype=torch.float64)
    for name, sprite in zip(F.SUBJECT_NAMES[:-2], sprites()[:-2], strict=True):
        parts = [getattr(sprite, layer) for layer in LAYERS]
        assert all((part(far[:, 0], far[:, 1]) > 0).all() for part in parts if part is not None), name


def test_colors_stay_themselves_under_jitter() -> None:
    """The middle of a plain disc is nearest to its own color's tone, whatever the jitter."""
    tones = torch.tensor([color.rgb for color in F.COLORS]) * 255
    for value in range(len(F.COLORS)):
        scenes = draw(64, 11 + value, subject=F.subject_id("surface"), color=value, texture=F.PLAIN)
        pixels = world.render(scenes).float()[:, :, 24:40, 24:40].mean((2, 3))
        nearest = torch.cdist(pixels, tones).argmin(1)
        assert (nearest == value).float().mean() > 0.95, F.COLORS[value].words[0]


def test_copies_are_as_many_as_told() -> None:
    """Connected red regions, counted by flood fill, equal the count."""
    for count in range(1, 6):
        scenes = draw(
            6, 13, subject=F.subject_id("circle"), color=F.color_id("red"), texture=0, place=0, count=count
        )
        pixels = compose(scenes)
        red = (pixels[:, 0] - pixels[:, 1]) > 0.35
        assert [regions(mask) for mask in red] == [count] * 6


def regions(mask: torch.Tensor) -> int:
    left = {(int(y), int(x)) for y, x in mask.nonzero()}
    found = 0
    while left:
        found += 1
        edge = [left.pop()]
        while edge:
            y, x = edge.pop()
            for near in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if near in left:
                    left.remove(near)
                    edge.append(near)
    return found


def test_exact_arithmetic_stands_in_for_sine_and_rotation() -> None:
    t = torch.linspace(-2, 2, 401)
    assert (wave(t) - torch.sin(2 * torch.pi * t)).abs().max() < 0.06
    angle = torch.linspace(-1, 1, 50)
    cos, sin = rotation(torch.tan(angle / 2))
    assert torch.allclose(cos, torch.cos(angle), atol=1e-6)
    assert torch.allclose(sin, torch.sin(angle), atol=1e-6)


@pytest.mark.gpu
def test_a_gpu_draws_the_same_images_up_to_rounding() -> None:
    scenes = world.sample(128, torch.Generator().manual_seed(1))
    difference = world.render(scenes).int() - world.render(scenes.to("cuda")).cpu().int()
    assert difference.abs().max() <= 1
