"""A task's images as a `ImageSet`: rendered in memory, chunk by chunk, when first asked for."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

import torch
from PIL import Image
from torch import Tensor

from dear.clip.images import resize_crop
from dear.data.images import find_classes, renumber
from dear.errors import DataError
from dear.world import factors as F
from dear.world.renderer import SIDE, compose, in_style, palette, to_bytes
from dear.world.scenes import Scenes, sample
from dear.world.tasks import TASKS, Task

SPLITS: Final = ("train", "test")
_CHUNK = 240  # images rendered at once; what an image looks like does not depend on it


@dataclass(frozen=True, eq=False)
class WorldImages:
    """Some images of a task.

    Attributes:
        name: "world:NAME".
        classes: names, one a label.
        template: prompt with `{}`.
        labels: int64 [n].
        domains: one an image, or None.
        places: where each image stands: split and number in it.
    """

    name: str
    classes: tuple[str, ...]
    template: str
    labels: Tensor
    domains: tuple[str, ...] | None
    places: tuple[tuple[str, int], ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.places)

    def pixels(self, indices: Sequence[int], size: int) -> Tensor:
        """The evaluation view.

        Returns:
            uint8 [b, 3, size, size]; images are 64 pixels wide, other sizes are bicubic enlargements.
        """
        if size != SIDE:
            views = [resize_crop(self.image(index), size) for index in indices]
            return torch.stack(views) if views else torch.empty(0, 3, size, size, dtype=torch.uint8)
        views = [self._square(int(index)) for index in indices]
        return torch.stack(views) if views else torch.empty(0, 3, SIDE, SIDE, dtype=torch.uint8)

    def image(self, index: int) -> Image.Image:
        """A whole image, RGB, 64 pixels wide and high."""
        return Image.fromarray(self._square(int(index)).permute(1, 2, 0).contiguous().numpy(), "RGB")

    def key(self, index: int) -> str:
        """A stable name such as "world:textures/test/000123"."""
        split, number = self.places[int(index)]
        return f"{self.name}/{split}/{number:06d}"

    def subset(self, indices: Sequence[int]) -> WorldImages:
        """The images at `indices`, in that order, with the same classes."""
        order = [int(index) for index in indices]
        return replace(
            self,
            labels=self.labels[torch.tensor(order, dtype=torch.int64)],
            domains=None if self.domains is None else tuple(self.domains[index] for index in order),
            places=tuple(self.places[index] for index in order),
        )

    def select_classes(self, names: Sequence[str]) -> WorldImages:
        """The images of some classes; labels count into `names`.

        Raises:
            DataError: a name is not one of the classes.
        """
        chosen, labels = renumber(self.labels, find_classes(self, names))
        return replace(self.subset(chosen.tolist()), labels=labels, classes=tuple(names))

    def _square(self, index: int) -> Tensor:
        """uint8 [3, 64, 64]."""
        split, number = self.places[index]
        return _chunk(self.name.removeprefix("world:"), split, number // _CHUNK)[number % _CHUNK]


def check_task_name(name: str) -> None:
    """Refuse a name that no task has.

    Raises:
        DataError: there is no such task.
    """
    if name not in TASKS:
        raise DataError(f"world:{name}: no such task; the tasks are {', '.join(TASKS)}")


def task(name: str, split: str) -> WorldImages:
    """The images of a task.

    Args:
        name: one of `list_tasks()`.
        split: "train", "test", or "all" (one after the other).

    Raises:
        DataError: there is no such task or split.

    >>> images = task("vehicles", "test")
    >>> len(images), images.classes[0], images.template
    (600, 'car', 'a photo of a {}.')
    """
    check_task_name(name)
    if split not in (*SPLITS, "all"):
        raise DataError(f"world:{name}: has the splits train, test and all, not {split!r}")
    chosen = TASKS[name]
    labels: list[int] = []
    domains: list[str] = []
    places: list[tuple[str, int]] = []
    for part in SPLITS if split == "all" else (split,):
        for number, (label, domain) in enumerate(_plan(chosen, part)):
            labels.append(label)
            domains.append(domain)
            places.append((part, number))
    return WorldImages(
        f"world:{name}",
        chosen.classes,
        chosen.template,
        torch.tensor(labels),
        tuple(domains) if chosen.domains else None,
        tuple(places),
    )


def _plan(task: Task, split: str) -> list[tuple[int, str]]:
    """Label and domain of every image of a split, in order."""
    each = task.train if split == "train" else task.test
    return [
        (label, domain)
        for label in range(len(task.classes))
        for domain in task.domains or ("photo",)
        for _ in range(each)
    ]


@lru_cache(maxsize=32)
def scenes(name: str, split: str) -> Scenes:
    """What is in the images of a split: the scenes before the task's look."""
    task = TASKS[name]
    plan = _plan(task, split)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{split}".encode()))
    drawn = sample(len(plan), generator, kinds=task.kinds, avoid_held_out=False)
    labels = torch.tensor([label for label, _ in plan])
    values = {"count": torch.ones_like(labels)}
    values["style"] = torch.tensor([F.style_id(domain) for _, domain in plan])
    for factor in ("subject", "color", "texture", "place"):
        fixed = torch.tensor([-1 if (v := getattr(m, factor)) is None else v for m in task.meanings])[labels]
        values[factor] = torch.where(fixed >= 0, fixed, getattr(drawn, factor))
    return drawn.replace(**values)


@lru_cache(maxsize=256)
@torch.no_grad()
def _chunk(name: str, split: str, number: int) -> Tensor:
    """Rendered images, uint8 [at most _CHUNK, 3, 64, 64]."""
    task = TASKS[name]
    part = scenes(name, split)[slice(number * _CHUNK, (number + 1) * _CHUNK)]
    tones = palette("cpu")
    if task.clash:
        # Marks in the tones of the color five places on: a pairing that pretraining never draws.
        other = tones.roll(5, 0)[:, :1].expand(-1, 2, -1)
        tones = torch.cat((tones[:, :1], tones[:, 1:] + (other - tones[:, 1:]) * task.strength), dim=1)
    pixels = in_style(part, compose(part, tones)).clamp(0, 1)
    return to_bytes(task.look(pixels, part, task.strength))
