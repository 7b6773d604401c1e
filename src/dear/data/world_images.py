"""A task's images as an `ImageSet`: rendered in memory, chunk by chunk, when first asked for."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Final, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from dear.data.images import BaseImageSet
from dear.errors import DataError
from dear.images.views import Size, resize_crop, side_of
from dear.utils.digest import of_parts
from dear.world import factors as F
from dear.world.renderer import SIDE, apply_styles, compose, paste, tables, to_bytes
from dear.world.scenes import NUISANCES, Scenes, sample
from dear.world.shortcuts import TEST, PlantedShortcut
from dear.world.tasks import WorldTask, find_task

SPLITS: Final = ("train", "test")
_FACTORS = ("subject", "color", "texture", "place")
_CHUNK = 240  # images rendered at once; what an image looks like does not depend on it


@dataclass(frozen=True, eq=False, repr=False)
class WorldImages(BaseImageSet):
    """Some images of a task."""

    per_image: ClassVar[tuple[str, ...]] = ("numbers",)
    name: str  #: "world:NAME"
    classes: tuple[str, ...]  #: names, one per label
    template: str  #: prompt with `{}`
    labels: Tensor  #: int64 [n]
    domains: tuple[str, ...] | None  #: one per image, or None
    #: split of each image, and its number in the split
    numbers: tuple[tuple[str, int], ...] = field(repr=False)
    #: the value that the shortcut's factor has in each image, or None
    groups: tuple[str, ...] | None = field(default=None, repr=False)
    #: which attributes each image shows, bool [n, C], in the task "attributes"
    targets: Tensor | None = field(default=None, repr=False)

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """The evaluation view, uint8 [b, 3, size, size]; sizes other than 64 are bicubic enlargements."""
        side = side_of(size)
        if side == SIDE:
            views = [self._square(int(index)) for index in indices]
        else:
            views = [resize_crop(self.image(index), size) for index in indices]
        return torch.stack(views) if views else torch.empty(0, 3, side, side, dtype=torch.uint8)

    def image(self, index: int) -> Image.Image:
        """A whole image, RGB, 64 pixels wide and high."""
        return Image.fromarray(self._square(int(index)).permute(1, 2, 0).contiguous().numpy(), "RGB")

    def key(self, index: int) -> str:
        """A stable name such as "world:textures/test/000123"."""
        split, number = self.numbers[int(index)]
        return f"{self.name}/{split}/{number:06d}"

    def digest(self, index: int) -> bytes:
        """Hash of the pixels: features of rendered images are cached as those of files are."""
        return of_parts(f"RGB {(SIDE, SIDE)}", self.image(index).tobytes())

    def _square(self, index: int) -> Tensor:
        """uint8 [3, 64, 64]."""
        split, number = self.numbers[index]
        return _chunk(self.name.removeprefix("world:"), split, number // _CHUNK)[number % _CHUNK]


def world_task(name: str, split: str) -> WorldImages:
    """The images of a task.

    Args:
        name: one of `list_tasks()`.
        split: "train", "test", or "all" (one after the other).

    >>> images = world_task("vehicles", "test")
    >>> len(images), images.classes[0], images.template
    (600, 'car', 'a photo of a {}.')
    """
    task = find_task(name)
    if split not in (*SPLITS, "all"):
        raise DataError(f"world:{name}: has the splits train, test and all, not {split!r}")
    parts = SPLITS if split == "all" else (split,)
    rows = [(part, number, row) for part in parts for number, row in enumerate(_plan(task, part))]
    shortcut = task.shortcut
    return WorldImages(
        f"world:{name}",
        task.classes,
        task.template,
        torch.tensor([row.label for _, _, row in rows]),
        tuple(row.domain for _, _, row in rows) if task.domains else None,
        tuple((part, number) for part, number, _ in rows),
        None if shortcut is None else tuple(shortcut.words[row.value] for _, _, row in rows),
        torch.cat([_targets(task, part) for part in parts]) if task.several else None,
    )


def _targets(task: WorldTask, split: str) -> Tensor:
    """Which classes the scenes of a split show, bool [n, C]: those whose fixed factor has their value."""
    drawn = scenes(task.name, split)
    columns = []
    for meaning in task.meanings:
        factor, value = next((name, v) for name in _FACTORS if (v := getattr(meaning, name)) is not None)
        columns.append(getattr(drawn, factor) == value)
    return torch.stack(columns, dim=1)


class _Row(NamedTuple):
    label: int
    domain: str = "photo"
    value: int = 0  # index into the shortcut's values


def _plan(task: WorldTask, split: str) -> list[_Row]:
    """Label, domain and shortcut value of every image of a split, in order."""
    labels = range(len(task.classes))
    if task.shortcut is not None:
        if split == "train":
            return [
                _Row(label, value=value) for label in labels for value in task.shortcut.train_values(label)
            ]
        values = range(len(task.shortcut.values))
        return [_Row(label, value=value) for label in labels for value in values for _ in range(TEST)]
    count = task.train if split == "train" else task.test
    domains = task.domains or ("photo",)
    return [_Row(label, domain) for label in labels for domain in domains for _ in range(count)]


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
    values["style"] = torch.tensor([F.row("style", row.domain) for row in plan])
    for factor in _FACTORS:
        fixed = torch.tensor([-1 if (v := getattr(m, factor)) is None else v for m in task.meanings])[labels]
        values[factor] = torch.where(fixed >= 0, fixed, getattr(drawn, factor))
    if task.shortcut is not None and task.shortcut.factor != "letter":
        values[task.shortcut.factor] = _shortcut_values(task.shortcut, plan)
    planted = drawn.replace(**values)
    return (
        _separate_subject(planted)
        if task.shortcut is not None and task.shortcut.factor == "letter"
        else planted
    )


def _shortcut_values(shortcut: PlantedShortcut, plan: Sequence[_Row]) -> Tensor:
    return torch.tensor([shortcut.values[row.value] for row in plan])


def _separate_subject(drawn: Scenes) -> Scenes:
    """The same scenes with a small subject in the corner across from the letter's, so that both are seen."""
    corner, nuisance = _corner(drawn), drawn.nuisance.clone()
    x, y, size = (NUISANCES.index(name) for name in ("x", "y", "size"))
    nuisance[:, size] *= 0.3
    nuisance[:, x] = 0.25 * nuisance[:, x] + 0.75 * (corner % 2 == 0)
    nuisance[:, y] = 0.25 * nuisance[:, y] + 0.75 * (corner // 2 == 0)
    return drawn.replace(nuisance=nuisance)


def _corner(drawn: Scenes) -> Tensor:
    """int64 [B], 0 to 3: where the letter goes."""
    return (drawn.variation("style_0") * 4).long().clamp_max(3)


@lru_cache(maxsize=256)
@torch.no_grad()
def _chunk(name: str, split: str, number: int) -> Tensor:
    """Rendered images, uint8 [at most _CHUNK, 3, 64, 64]."""
    task = find_task(name)
    rows = slice(number * _CHUNK, (number + 1) * _CHUNK)
    part = scenes(name, split)[rows]
    tones = tables("cpu").palette
    if task.clash:
        # Marks in the tones of the color five places on: a pairing that pretraining never draws.
        other = tones.roll(5, 0)[:, :1].expand(-1, 2, -1)
        tones = torch.cat((tones[:, :1], tones[:, 1:] + (other - tones[:, 1:]) * task.strength), dim=1)
    pixels = compose(part, tones)
    if task.shortcut is not None and task.shortcut.factor == "letter":
        # A white letter with a dark outline in a corner.
        letters = _shortcut_values(task.shortcut, _plan(task, split)[rows])
        white, plain = (torch.full_like(letters, row) for row in (F.row("color", "white"), F.PLAIN))
        paste(pixels, part.replace(subject=letters, color=white, texture=plain), _corner(part))
    pixels = apply_styles(part, pixels).clamp(0, 1)
    return to_bytes(task.look(pixels, part, task.strength))
