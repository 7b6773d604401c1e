"""Tasks: balanced, disjoint, the same always, and true to their class names."""

from __future__ import annotations

import pytest
import torch

from dear import world
from dear.data.images import ImageSet, select_domains
from dear.data.shots import halves
from dear.data.world_images import scenes, world_task
from dear.errors import DataError
from dear.world import factors as F
from dear.world.tasks import TASKS

NAMES = world.list_tasks()


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_balanced_disjoint_and_stable(name: str) -> None:
    train, test = world_task(name, "train"), world_task(name, "test")
    assert isinstance(train, ImageSet)
    assert train.classes == test.classes
    assert 10 <= len(train.classes) <= 24
    assert len(set(train.classes)) == len(train.classes)
    assert "{}" in train.template
    counts = torch.bincount(train.labels), torch.bincount(test.labels)
    assert all(len(count.unique()) == 1 and len(count) == len(train.classes) for count in counts)
    assert counts[0][0] >= 32
    assert counts[1][0] >= 25
    some = list(range(0, len(test), max(1, len(test) // 40)))
    pixels = test.pixels(some, 64)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (len(some), 3, 64, 64)
    seen = {image.numpy().tobytes() for image in train.pixels(range(120), 64)}
    assert not seen & {image.numpy().tobytes() for image in test.pixels(range(120), 64)}
    assert len(seen) == 120
    assert torch.equal(world_task(name, "test").pixels(some, 64), pixels)


@pytest.mark.parametrize("name", NAMES)
def test_images_show_their_class(name: str) -> None:
    """The scene behind an image has every value that its class name tells."""
    images, behind = world_task(name, "test"), scenes(name, "test")
    for index in range(0, len(images), 7):
        words = images.classes[int(images.labels[index])]
        subject = F.SUBJECT_NAMES[int(behind.subject[index])]
        told = {
            "subject": subject,
            "color": F.COLORS[int(behind.color[index])].words[0],
            "texture": F.TEXTURES[int(behind.texture[index])][0],
            "place": F.PLACES[int(behind.place[index])][1][0],
        }
        decides = {
            "textures": ("texture",),
            "emblems": ("color", "subject"),
            "scenes": ("place",),
            "mixed": ("texture", "color", "subject", "place"),
        }.get(name, ("subject",))
        for factor in decides:
            assert told[factor] in words


def test_the_look_is_a_shift_and_strength_zero_is_none() -> None:
    scene = world.sample(16, torch.Generator().manual_seed(4))
    pixels = world.render(scene).float() / 255
    for task in TASKS.values():
        assert 0 < task.strength <= 1
        assert torch.equal(task.look(pixels, scene, 0.0), pixels)
        assert (task.look(pixels, scene, task.strength) - pixels).abs().mean() > 0.02


def test_base_and_novel_halves() -> None:
    for name in NAMES:
        images = world_task(name, "test")
        base, novel = halves(images.classes)
        part = images.select_classes(novel)
        assert part.classes == novel
        assert len(part) == len(images) * len(novel) // len(images.classes)
        assert int(part.labels.max()) == len(novel) - 1
        index = len(part) // 2
        assert torch.equal(part.pixels([index], 64), images.pixels([len(images) - len(part) + index], 64))
        assert not set(base) & set(novel)


def test_domains() -> None:
    images = world_task("domains", "train")
    assert images.domains is not None
    assert set(images.domains) == {"photo", "sketch", "cartoon", "painting"}
    sketches = select_domains(images, ["sketch"])
    assert len(sketches) * 4 == len(images)
    assert len(torch.bincount(sketches.labels).unique()) == 1
    assert world_task("textures", "train").domains is None


def test_views_keys_and_subsets() -> None:
    images = world_task("fauna", "test")
    assert images.key(123) == "world:fauna/test/000123"
    part = images.subset([5, 400, 5])
    assert [part.key(i) for i in range(3)] == [images.key(i) for i in (5, 400, 5)]
    assert torch.equal(part.labels, images.labels[[5, 400, 5]])
    assert torch.equal(part.pixels([1], 64), images.pixels([400], 64))
    assert part.image(1).size == (64, 64)
    large = part.pixels([0, 1], 96)
    assert large.shape == (2, 3, 96, 96)
    assert (large[1].float().mean() - part.pixels([1], 64).float().mean()).abs() < 2
    assert images.pixels([], 64).shape == (0, 3, 64, 64)
    both = world_task("fauna", "all")
    assert len(both) == len(images) + len(world_task("fauna", "train"))


def test_what_does_not_exist_is_named() -> None:
    with pytest.raises(DataError, match=r"world:weather.*textures"):
        world_task("weather", "test")
    with pytest.raises(DataError, match="'val'"):
        world_task("fauna", "val")
    with pytest.raises(DataError, match="'unicorn'"):
        world_task("fauna", "test").select_classes(["unicorn"])
