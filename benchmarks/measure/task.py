"""A task of random weights, random images and random words: time does not depend on what they show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dear.clip.config import ClipConfig, last_third
from dear.clip.model import Clip
from dear.clip.variant import matrix_dtype
from dear.data.images import ListedImages
from dear.heads.roles import RoleMap
from dear.images.views import Size, resize_crop
from dear.methods import DeAR
from dear.methods.frozen import Frozen, Loss
from dear.runs.recipe import Recipe
from dear.train.frozen import steps_at_once
from dear.train.loop import optimizer_of, rates_of
from dear.train.recording import Inputs, StepRecording, can_record
from measure.literal import LiteralStep


def token_ids(config: ClipConfig, classes: int, shortest: int = 5, longest: int = 10) -> Tensor:
    """Prompts of the usual length, [C, context]: some words between the first and the last token."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(classes, config.text.context, dtype=torch.long)
    for row in range(classes):
        words = int(torch.randint(shortest, longest + 1, (), generator=generator))
        ids[row, 0] = config.text.vocab - 2
        ids[row, 1 : 1 + words] = torch.randint(300, config.text.vocab - 9000, (words,), generator=generator)
        ids[row, 1 + words] = config.text.vocab - 1
    return ids


def roles_of(config: ClipConfig) -> RoleMap:
    """Table 2's roles for a tower of its shape; another tower's heads are all mixed, which costs the same."""
    vision, table = config.vision, RoleMap.table2()
    if (vision.layers, vision.heads) == (12, table.heads):
        return table
    return RoleMap.uniform("mixed", tuple(last_third(vision.layers)), vision.heads, table.core)


_POOL = 64  # images that exist; a set shows them again and again


@cache
def _noise(number: int, width: int, height: int) -> Image.Image:
    array = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(array)


@cache
def _view(number: int, width: int, height: int, size: Size) -> Tensor:
    return resize_crop(_noise(number, width, height), size)


class NoiseImages(ListedImages):
    """Random images in memory whose views are made once, as if they were decoded already."""

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """The evaluation views, uint8 [b, 3, size, size]."""
        return torch.stack([_view(index % _POOL, *self.items[index].size, size) for index in indices])


def noise(classes: int, count: int, width: int, height: int, domains: str = "") -> NoiseImages:
    """A set of `count` random images; `domains` has a letter for each domain."""
    return NoiseImages(
        tuple(_noise(index % _POOL, width, height) for index in range(count)),
        torch.arange(count) % classes,
        tuple(f"class {label}" for label in range(classes)),
        name="noise",
        domains=tuple(domains[index % len(domains)] for index in range(count)) if domains else None,
    )


@dataclass
class Steps:
    """One way to take training steps: `run()` takes `count` of them."""

    run: Callable[[], object]
    count: int = 1


class SpeedTask:
    """DeAR on a random CLIP, a batch, and every way to take a step on it.

    Args:
        clip: the backbone, on its device.
        batch: images per step.
        classes: classes.
        precision: as in the recipe.
        preset: name of DeAR's preset.
        changes: of its options.
    """

    def __init__(
        self,
        clip: Clip,
        batch: int,
        classes: int,
        precision: str = "auto",
        preset: str = "paper",
        **changes: Any,
    ) -> None:
        self.clip, self.batch, self.classes, self.precision = clip, batch, classes, precision
        self.device = clip.device
        self.ids = token_ids(clip.config, classes)
        names = [f"class {i}" for i in range(classes)]
        options = {**DeAR.preset(preset).options, **changes}
        model = DeAR(clip, names, roles=roles_of(clip.config), ids=self.ids, **options)
        self.model = model.in_precision(precision)
        self.dtype = self.model.clip.visual.dtype
        size, generator = clip.config.vision.image_size, torch.Generator(self.device).manual_seed(0)
        self.at_once = steps_at_once(size, batch)
        shape = (self.at_once * batch, 3, size, size)
        self.pixels = torch.randn(shape, device=self.device, generator=generator)
        self.labels = torch.randint(0, classes, shape[:1], device=self.device, generator=generator)
        self.recipe = Recipe(batch=batch, lr=1e-6, precision=precision)

    def one(self) -> tuple[Tensor, Tensor]:
        """The first batch."""
        return self.pixels[: self.batch], self.labels[: self.batch]

    def literal(self, precision: str | None = None) -> Steps:
        """The step without savings, by autocast in the task's precision or another."""
        dtype = matrix_dtype(precision or self.precision, self.device)
        step = LiteralStep(self.model, self.ids, self.clip)
        optimizer = torch.optim.AdamW(step.learned.values(), 1e-6)

        def run() -> None:
            optimizer.zero_grad()
            with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
                loss = step.loss(*self.one())
            loss.backward()
            optimizer.step()

        return Steps(run)

    def eager(self) -> Steps:
        """Ours, launched kernel by kernel; so it runs on a CPU."""
        optimizer = optimizer_of(list(self.model.parameters()), self.recipe, rates_of(self.model))

        def run() -> None:
            optimizer.zero_grad()
            self.model.loss(*self.one()).total.backward()
            optimizer.step()

        return Steps(run)

    def replayed(self, ahead: bool = True, update: bool = True) -> Steps:
        """Ours as training on a GPU runs it: recorded, and with the frozen part of several steps at once.

        Without `ahead` the frozen part belongs to the step; without `update` AdamW is not recorded.
        """
        model, learned = self.model, list(self.model.parameters())
        optimizer = optimizer_of(learned, self.recipe, rates_of(model))

        def gradients(inputs: Inputs) -> Loss:
            x, *others, labels = inputs
            assert x is not None
            assert labels is not None
            loss = model.loss_from_frozen(Frozen(x, *others), labels) if ahead else model.loss(x, labels)
            loss.total.backward()
            return loss

        def inputs() -> list[Inputs]:
            if not ahead:
                return [self.one()]
            labels = self.labels.split(self.batch)
            with torch.no_grad():
                stages = model.frozen_stage(self.pixels).split([len(part) for part in labels])
            return [(*stage, part) for stage, part in zip(stages, labels, strict=True)]

        assert can_record(optimizer)
        first = inputs()[0]
        gradients(first)
        optimizer.step()  # allocates its state
        replay = StepRecording(gradients, first, learned, optimizer if update else None)

        def run() -> None:
            for part in inputs():
                replay(part)
                if not update:
                    optimizer.step()

        return Steps(run, self.at_once if ahead else 1)

    def ours(self) -> Steps:
        """Ours as training runs it on this device."""
        return self.replayed() if self.device.type == "cuda" else self.eager()
