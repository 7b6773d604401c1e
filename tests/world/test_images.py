"""The renderer: the same images always, and every factor visible in them."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dear import world
from dear.world import factors as F
from dear.world.atlas import LAYERS, REACH, UNIT, atlas
from dear.world.atlas import SIDE as ATLAS_SIDE
from dear.world.exact import noise_tiles, rotation, sqrt, wave
from dear.world.renderer import apply_styles, compose, to_bytes
from dear.world.scenes import Scenes
from dear.world.sprites import sprites
from dear.world.tasks import TASKS

# Rendering uses only operations that IEEE 754 rounds correctly, so these hold on every CPU, with any number
# of threads and any build of torch whose CPU generator is the Mersenne twister. A change of the images on
# purpose changes them.
SCENES_SHA = "c00199d699f07f5be13ed92d870e7fbf9d67b7584093acce9b2274e9139db21e"
IMAGES_SHA = "7042146f5e58218651079ad777106dd2deb1fae9e773316181f12865d5961ee0"


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


# Operations that give the same bits in every build: exactly rounded, or moving and comparing values.
EXACT = frozenset(
    [
        "_to_copy",
        "abs",
        "add",
        "add_",
        "amax",
        "amin",
        "arange",
        "bincount",
        "bitwise_and",
        "bitwise_and_",
        "bitwise_not",
        "bitwise_or",
        "bitwise_or_",
        "bitwise_xor",
        "bitwise_xor_",
        "bucketize",
        "cat",
        "clamp",
        "clamp_",
        "clamp_max",
        "clamp_min",
        "clone",
        "copy_",
        "detach",
        "div",
        "empty",
        "empty_like",
        "eq",
        "expand",
        "fill_",
        "flip",
        "floor",
        "full",
        "full_like",
        "gather",
        "ge",
        "gt",
        "index",
        "index_put_",
        "index_select",
        "le",
        "lift_fresh",
        "lt",
        "max",
        "maximum",
        "min",
        "minimum",
        "mul",
        "mul_",
        "ne",
        "neg",
        "new_empty",
        "nonzero",
        "ones_like",
        "permute",
        "rand",
        "reciprocal",
        "remainder",
        "repeat_interleave",
        "replication_pad2d",
        "round",
        "rsub",
        "scalar_tensor",
        "select",
        "slice",
        "slice_backward",
        "sort",
        "stack",
        "sub",
        "t",
        "transpose",
        "unsqueeze",
        "view",
        "where",
        "zeros",
        "zeros_like",
        "_unsafe_view",
        "alias",
    ]
)


class Recorded(TorchDispatchMode):
    """Names of all operations of PyTorch that are run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_only_exactly_rounded_operations_are_used() -> None:
    """Square roots, sums and the like are left to libraries and differ between machines (see `exact`)."""
    with Recorded() as seen:
        scenes = world.sample(250, torch.Generator().manual_seed(1))
        pixels = compose(scenes)
        to_bytes(apply_styles(scenes, pixels))
        for look in {task.look for task in TASKS.values()}:
            look(pixels[:4].clone(), scenes[:4], 0.5)
        atlas.__wrapped__("cpu")
        noise_tiles.__wrapped__("cpu")
    assert len(scenes.texture.unique()) == len(F.TEXTURES)
    assert len(scenes.place.unique()) == len(F.PLACES)
    assert len(scenes.style.unique()) == len(F.STYLES)
    assert seen.names >= {"add", "mul", "floor"}
    assert not seen.names - EXACT, sorted(seen.names - EXACT)


def test_the_square_root_is_correctly_rounded() -> None:
    values = torch.rand(2000, generator=torch.Generator().manual_seed(4))
    for value, root in zip(values.tolist(), sqrt(values).tolist(), strict=True):
        # The root lies between the midpoints to the neighboring floats: compared as exact fractions.
        below, above = (
            (Fraction(root) + Fraction(float(np.nextafter(np.float32(root), np.float32(side))))) / 2
            for side in (0, 2)
        )
        assert below**2 <= Fraction(value) <= above**2
    assert sqrt(torch.tensor(2.0, dtype=torch.float64)).item() == math.sqrt(2)


def test_no_sample_of_a_sprite_lies_between_two_steps() -> None:
    """Sines of the sprites' corners may differ in the last bit: no stored distance may depend on that."""
    step = 2 * REACH / ATLAS_SIDE
    axis = (torch.arange(ATLAS_SIDE, dtype=torch.float64) + 0.5) * step - REACH
    y, x = torch.meshgrid(-axis, axis, indexing="ij")
    for sprite in sprites():
        for layer in LAYERS:
            if (part := getattr(sprite, layer)) is not None:
                place = part(x.contiguous(), y.contiguous()) / UNIT
                near = (place - place.floor() - 0.5).abs()[place.abs() < 129]
                assert near.numel() == 0 or near.min() > 1e-9


def test_an_image_does_not_depend_on_its_batch_or_on_threads() -> None:
    scenes = world.sample(60, torch.Generator().manual_seed(3))
    whole = world.render(scenes)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    assert torch.equal(world.render(scenes[order]), whole[order])
    assert torch.equal(torch.cat([world.render(scenes[i : i + 1]) for i in range(8)]), whole[:8])
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
    scenes = draw(8, 5, subject=F.row("subject", "circle"), color=F.row("color", "teal"), place=0)
    values = range(first, first + sizes[factor])
    images = [world.render(scenes.replace(**{factor: torch.full((8,), value)})).float() for value in values]
    for i, one in enumerate(images):
        for other in images[i + 1 :]:
            changed = (one - other).abs().amax(1) > 24  # [8, 64, 64]
            assert changed.float().mean(dim=(1, 2)).min() > 0.015


def test_every_subject_shows_and_none_looks_like_another() -> None:
    number = len(F.SUBJECT_NAMES)
    scenes = draw(1, 7, subject=0, color=F.row("color", "red"), texture=F.PLAIN, place=0)
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
        scenes = draw(64, 11 + value, subject=F.row("subject", "surface"), color=value, texture=F.PLAIN)
        pixels = world.render(scenes).float()[:, :, 24:40, 24:40].mean((2, 3))
        nearest = torch.cdist(pixels, tones).argmin(1)
        assert (nearest == value).float().mean() > 0.95, F.COLORS[value].words[0]


def test_copies_are_as_many_as_told() -> None:
    """Connected red regions, counted by flood fill, equal the count."""
    for count in range(1, 6):
        scenes = draw(
            6,
            13,
            subject=F.row("subject", "circle"),
            color=F.row("color", "red"),
            texture=0,
            place=0,
            count=count,
        )
        pixels = compose(scenes)
        red = (pixels[:, 0] - pixels[:, 1]) > 0.35
        assert [regions(mask) for mask in red] == [count] * 6


def regions(mask: torch.Tensor) -> int:
    left = {(int(y), int(x)) for y, x in mask.nonzero()}
    count = 0
    while left:
        count += 1
        edge = [left.pop()]
        while edge:
            y, x = edge.pop()
            for near in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if near in left:
                    left.remove(near)
                    edge.append(near)
    return count


def test_exact_arithmetic_stands_in_for_sine_and_rotation() -> None:
    t = torch.linspace(-2, 2, 401)
    assert (wave(t) - torch.sin(2 * torch.pi * t)).abs().max() < 0.06
    angle = torch.linspace(-1, 1, 50)
    cos, sin = rotation(torch.tan(angle / 2))
    assert torch.allclose(cos, torch.cos(angle), atol=1e-6)
    assert torch.allclose(sin, torch.sin(angle), atol=1e-6)
