"""Tasks: balanced, disjoint, the same always, and true to their class names."""

from __future__ import annotations

import pytest
import torch

from dear.data import world
from dear.data.pictures import PictureSet, select_domains
from dear.data.split import halves
from dear.data.world import factors as F
from dear.data.world.served import scenes
from dear.data.world.tasks import TASKS
from dear.errors import DataError

NAMES = world.list_tasks()


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_balanced_disjoint_and_stable(name: str) -> None:
    train, test = world.task(name, "train"), world.task(name, "test")
    assert isinstance(train, PictureSet)
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
    seen = {picture.numpy().tobytes() for picture in train.pixels(range(120), 64)}
    assert not seen & {picture.numpy().tobytes() for picture in test.pixels(range(120), 64)}
    assert len(seen) == 120
    assert torch.equal(world.task(name, "test").pixels(some, 64), pixels)


@pytest.mark.parametrize("name", NAMES)
def test_pictures_show_their_class(name: str) -> None:
    """The scene behind a picture has every value that its class name tells."""
    pictures, behind = world.task(name, "test"), scenes(name, "test")
    for index in range(0, len(pictures), 7):
        words = pictures.classes[int(pictures.labels[index])]
        subject = F.SUBJECT_NAMES[int(behind.subject[index])]
        told = {
            "subject": subject,
            "colour": F.COLOURS[int(behind.colour[index])].words[0],
            "texture": F.TEXTURES[int(behind.texture[index])][0],
            "place": F.PLACES[int(behind.place[index])][1][0],
        }
        decides = {
            "textures": ("texture",),
            "emblems": ("colour", "subject"),
            "scenes": ("place",),
            "mixed": ("texture", "colour", "subject", "place"),
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
        pictures = world.task(name, "test")
        base, novel = halves(pictures.classes)
        part = pictures.select_classes(novel)
        assert part.classes == novel
        assert len(part) == len(pictures) * len(novel) // len(pictures.classes)
        assert int(part.labels.max()) == len(novel) - 1
        index = len(part) // 2
        assert torch.equal(part.pixels([index], 64), pictures.pixels([len(pictures) - len(part) + index], 64))
        assert not set(base) & set(novel)


def test_domains() -> None:
    pictures = world.task("domains", "train")
    assert pictures.domains is not None
    assert set(pictures.domains) == {"photo", "sketch", "cartoon", "painting"}
    sketches = select_domains(pictures, ["sketch"])
    assert len(sketches) * 4 == len(pictures)
    assert len(torch.bincount(sketches.labels).unique()) == 1
    assert world.task("textures", "train").domains is None


def test_views_keys_and_subsets() -> None:
    pictures = world.task("fauna", "test")
    assert pictures.key(123) == "world:fauna/test/000123"
    part = pictures.subset([5, 400, 5])
    assert [part.key(i) for i in range(3)] == [pictures.key(i) for i in (5, 400, 5)]
    assert torch.equal(part.labels, pictures.labels[[5, 400, 5]])
    assert torch.equal(part.pixels([1], 64), pictures.pixels([400], 64))
    assert part.picture(1).size == (64, 64)
    large = part.pixels([0, 1], 96)
    assert large.shape == (2, 3, 96, 96)
    assert (large[1].float().mean() - part.pixels([1], 64).float().mean()).abs() < 2
    assert pictures.pixels([], 64).shape == (0, 3, 64, 64)
    both = world.task("fauna", "all")
    assert len(both) == len(pictures) + len(world.task("fauna", "train"))


def test_what_does_not_exist_is_named() -> None:
    with pytest.raises(DataError, match="world:weather: no such task; the tasks are textures"):
        world.task("weather", "test")
    with pytest.raises(DataError, match="'val'"):
        world.task("fauna", "val")
    with pytest.raises(DataError, match="'unicorn'"):
        world.task("fauna", "test").select_classes(["unicorn"])
