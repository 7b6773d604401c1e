"""A task's images as an `ImageSet`: rendered in memory, chunk by chunk, when first asked for."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Final

import torch
from PIL import Image
from torch import Tensor

from dear._io.image_file import Size, resize_crop, side_of
from dear.data.images import Rows
from dear.errors import DataError
from dear.world import factors as F
from dear.world.renderer import SIDE, compose, in_style, palette, paste, to_bytes
from dear.world.scenes import NUISANCES, Scenes, sample
from dear.world.shortcuts import TEST
from dear.world.tasks import Task, find_task

SPLITS: Final = ("train", "test")
_CHUNK = 240  # images rendered at once; what an image looks like does not depend on it


@dataclass(frozen=True, eq=False)
class WorldImages(Rows):
    """Some images of a task."""

    per_image: ClassVar[tuple[str, ...]] = ("places",)
    name: str  #: "world:NAME"
    classes: tuple[str, ...]  #: names, one per label
    template: str  #: prompt with `{}`
    labels: Tensor  #: int64 [n]
    domains: tuple[str, ...] | None  #: one per image, or None
    #: where each image stands: split and number in it
    places: tuple[tuple[str, int], ...] = field(repr=False)
    #: the value that the shortcut's factor has in each image, or None
    groups: tuple[str, ...] | None = field(default=None, repr=False)

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """The evaluation view.

        Returns:
            uint8 [b, 3, size, size]; images are 64 pixels wide, other sizes are bicubic enlargements.
        """
        side = side_of(size)
        if side != SIDE:
            views = [resize_crop(self.image(index), size) for index in indices]
            return torch.stack(views) if views else torch.empty(0, 3, side, side, dtype=torch.uint8)
        views = [self._square(int(index)) for index in indices]
        return torch.stack(views) if views else torch.empty(0, 3, SIDE, SIDE, dtype=torch.uint8)

    def image(self, index: int) -> Image.Image:
        """A whole image, RGB, 64 pixels wide and high."""
        return Image.fromarray(self._square(int(index)).permute(1, 2, 0).contiguous().numpy(), "RGB")

    def key(self, index: int) -> str:
        """A stable name such as "world:textures/test/000123"."""
        split, number = self.places[int(index)]
        return f"{self.name}/{split}/{number:06d}"

    def _square(self, index: int) -> Tensor:
        """uint8 [3, 64, 64]."""
        split, number = self.places[index]
        return _chunk(self.name.removeprefix("world:"), split, number // _CHUNK)[number % _CHUNK]


def check_task_name(name: str) -> None:
    """Refuse a name that no task has."""
    find_task(name)


def task(name: str, split: str) -> WorldImages:
    """The images of a task.

    Args:
        name: one of `list_tasks()`.
        split: "train", "test", or "all" (one after the other).

    >>> images = task("vehicles", "test")
    >>> len(images), images.classes[0], images.template
    (600, 'car', 'a photo of a {}.')
    """
    check_task_name(name)
    if split not in (*SPLITS, "all"):
        raise DataError(f"world:{name}: has the splits train, test and all, not {split!r}")
    chosen = find_task(name)
    labels: list[int] = []
    domains: list[str] = []
    groups: list[str] = []
    places: list[tuple[str, int]] = []
    for part in SPLITS if split == "all" else (split,):
        for number, row in enumerate(_plan(chosen, part)):
            labels.append(row.label)
            domains.append(row.domain)
            groups.append("" if chosen.shortcut is None else chosen.shortcut.words[row.value])
            places.append((part, number))
    return WorldImages(
        f"world:{name}",
        chosen.classes,
        chosen.template,
        torch.tensor(labels),
        tuple(domains) if chosen.domains else None,
        tuple(places),
        None if chosen.shortcut is None else tuple(groups),
    )


@dataclass(frozen=True)
class _Row:
    """Label, domain and (place of the) shortcut's value of an image."""

    label: int
    domain: str = "photo"
    value: int = 0


def _plan(task: Task, split: str) -> list[_Row]:
    """Label, domain and shortcut value of every image of a split, in order."""
    labels = range(len(task.classes))
    if task.shortcut is not None:
        if split == "train":
            return [
                _Row(label, value=value) for label in labels for value in task.shortcut.train_values(label)
            ]
        values = range(len(task.shortcut.values))
        return [_Row(label, value=value) for label in labels for value in values for _ in range(TEST)]
    each = task.train if split == "train" else task.test
    domains = task.domains or ("photo",)
    return [_Row(label, domain) for label in labels for domain in domains for _ in range(each)]


@lru_cache(maxsize=32)
def scenes(name: str, split: str) -> Scenes:
    """What is in the images of a split: the scenes before the task's look."""
    task = find_task(name)
    plan = _plan(task, split)
    # Tasks that differ in the correlation alone draw the same scenes but for the shortcut's values.
    seed = name.partition("@")[0]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{split}".encode()))
    drawn = sample(len(plan), generator, kinds=task.kinds, avoid_held_out=False)
    labels = torch.tensor([row.label for row in plan])
    values = {"count": torch.ones_like(labels)}
    values["style"] = torch.tensor([F.style_id(row.domain) for row in plan])
    for factor in ("subject", "color", "texture", "place"):
        fixed = torch.tensor([-1 if (v := getattr(m, factor)) is None else v for m in task.meanings])[labels]
        values[factor] = torch.where(fixed >= 0, fixed, getattr(drawn, factor))
    if task.shortcut is None:
        return drawn.replace(**values)
    if task.shortcut.factor == "letter":
        return _apart(drawn.replace(**values))
    values[task.shortcut.factor] = torch.tensor(task.shortcut.values)[
        torch.tensor([row.value for row in plan])
    ]
    return drawn.replace(**values)


def _apart(drawn: Scenes) -> Scenes:
    """The same scenes with a small subject in the corner across from the letter's, so that both are seen."""
    corner, free = _corner(drawn), drawn.nuisance.clone()
    x, y, size = (NUISANCES.index(name) for name in ("x", "y", "size"))
    free[:, size] *= 0.3
    free[:, x] = 0.25 * free[:, x] + 0.75 * (corner % 2 == 0)
    free[:, y] = 0.25 * free[:, y] + 0.75 * (corner // 2 == 0)
    return drawn.replace(nuisance=free)


def _corner(drawn: Scenes) -> Tensor:
    """int64 [B], 0 to 3: where the letter goes."""
    return (drawn.free("style_0") * 4).long().clamp_max(3)


def _letters(task: Task, split: str, part: slice, pixels: Tensor, drawn: Scenes) -> None:
    """Paste each image's letter into a corner, white with a dark outline, in place."""
    assert task.shortcut is not None
    letters = torch.tensor(task.shortcut.values)[
        torch.tensor([row.value for row in _plan(task, split)[part]])
    ]
    white, plain = torch.full_like(letters, F.color_id("white")), torch.full_like(letters, F.PLAIN)
    paste(pixels, drawn.replace(subject=letters, color=white, texture=plain), _corner(drawn))


@lru_cache(maxsize=256)
@torch.no_grad()
def _chunk(name: str, split: str, number: int) -> Tensor:
    """Rendered images, uint8 [at most _CHUNK, 3, 64, 64]."""
    task = find_task(name)
    rows = slice(number * _CHUNK, (number + 1) * _CHUNK)
    part = scenes(name, split)[rows]
    tones = palette("cpu")
    if task.clash:
        # Marks in the tones of the color five places on: a pairing that pretraining never draws.
        other = tones.roll(5, 0)[:, :1].expand(-1, 2, -1)
        tones = torch.cat((tones[:, :1], tones[:, 1:] + (other - tones[:, 1:]) * task.strength), dim=1)
    pixels = compose(part, tones)
    if task.shortcut is not None and task.shortcut.factor == "letter":
        _letters(task, split, rows, pixels, part)
    pixels = in_style(part, pixels).clamp(0, 1)
    return to_bytes(task.look(pixels, part, task.strength))
