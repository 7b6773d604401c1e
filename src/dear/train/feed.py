"""Batches of a training set: images decoded once, views drawn by the seed and the step alone.

The batch of a step does not depend on earlier steps, so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.data.batches import images_at_once
from dear.data.content import source_of
from dear.data.folds import IntArray
from dear.data.images import ImageSet, targets_of
from dear.errors import DataError
from dear.images.open import open_pixels
from dear.images.views import normalize, resize_short, to_tensor
from dear.methods.frozen import Batch
from dear.runs.recipe import Recipe
from dear.train.crops import augment_batch, crop_batch, sample_boxes
from dear.utils.parallel import map_threads


class TrainingPixels:
    """The images of a set, large enough to crop training views of `size` from.

    A random crop covers at least `least_area` of an image, so a short side of `size / sqrt(least_area)` is
    enough for the smallest crop to have about `size` pixels; larger images are shrunk to that once (aspect
    kept), smaller ones stay as they are. Decoded images are kept on `device` until `limit_bytes` are used;
    the rest are decoded each time.

    >>> ready = TrainingPixels(images, 224)                                        # doctest: +SKIP
    >>> pixels, sizes = ready.batch([3, 1, 4])                                     # doctest: +SKIP
    """

    def __init__(
        self,
        images: ImageSet,
        size: int,
        device: torch.device | str = "cpu",
        least_area: float = 0.5,
        limit_bytes: int = 4 << 30,
    ) -> None:
        self.images = images
        self.short_side = math.ceil(size / math.sqrt(least_area))
        self.device = torch.device(device)
        self.limit_bytes = limit_bytes
        self._kept: dict[int, Tensor] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Some images, padded at the right and bottom to the largest of them.

        Returns:
            uint8 [b, 3, h, w] on the device, and int64 [b, 2] (on the CPU): height and width of each image.
        """
        numbers = [int(index) for index in indices]
        missing = [index for index in dict.fromkeys(numbers) if index not in self._kept]
        decoded = dict(zip(missing, map_threads(self._decode, missing), strict=True))
        for index, image in decoded.items():
            if self._bytes + image.numel() <= self.limit_bytes:
                self._kept[index] = image
                self._bytes += image.numel()
        return pad([decoded[index] if index in decoded else self._kept[index] for index in numbers])

    def _decode(self, index: int) -> Tensor:
        """One image, uint8 [3, h, w], on the device."""
        pixels = open_pixels(source_of(self.images, index))
        if min(pixels.shape[:2]) > self.short_side:
            pixels = resize_short(pixels, self.short_side)
        return to_tensor(pixels).to(self.device)


def pad(images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack images of any sizes: uint8 [b, 3, h, w] and their true sizes, int64 [b, 2].

    >>> batch, sizes = pad([torch.ones(3, 4, 2), torch.ones(3, 3, 5)])
    >>> batch.shape, sizes.tolist()
    (torch.Size([2, 3, 4, 5]), [[4, 2], [3, 5]])
    """
    sizes = torch.tensor([image.shape[-2:] for image in images])
    height, width = sizes.amax(0).tolist()
    if bool((sizes == sizes[0]).all()):
        return torch.stack(list(images)), sizes
    batch = images[0].new_zeros(len(images), 3, height, width)
    for row, image in zip(batch, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]] = image
    return batch, sizes


def seeded_generator(seed: int, purpose: str, number: int) -> torch.Generator:
    """A random generator for one purpose and step, independent of what was drawn before."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


class Feed:
    """Batches of a training set: decoded once, kept as bytes on the device, augmented there.

    Args:
        images: the training set.
        clip: the backbone, for the size and normalization of its input and for the device.
        recipe: batch size, crops, flips and seed.
        units: of the images, [n]; copies of an image have the same. None: not searched.
    """

    def __init__(self, images: ImageSet, clip: Clip, recipe: Recipe, units: IntArray | None = None) -> None:
        if len(images) == 0:
            raise DataError(f"{images.name}: training needs at least one image, got none")
        self.images, self.recipe = images, recipe
        self.size, self.device = clip.config.vision.image_size, clip.device
        self.view = clip.config.view
        self.mean, self.std = clip.config.mean, clip.config.std
        targets = targets_of(images)
        self.labels = (images.labels if targets is None else targets.float()).to(self.device)
        self.units = None if units is None else torch.from_numpy(units)
        self.domains: Tensor | None = None
        if images.domains is not None:
            names = sorted(set(images.domains))
            self.domains = torch.tensor([names.index(d) for d in images.domains], device=self.device)
        self.decoded = TrainingPixels(images, self.size, self.device, least_area=recipe.scale[0])
        on_cpu = self.device.type == "cpu"
        self.prepare_batch = recipe.batch if on_cpu else max(recipe.batch, images_at_once(clip))
        self._order: tuple[int, list[int]] = (-1, [])
        self._passes = 0

    @property
    def steps_per_epoch(self) -> int:
        """The batches of one epoch; the last may be smaller."""
        return -(-len(self.images) // self.recipe.batch)

    def batch(self, indices: Sequence[int], generator: torch.Generator | None) -> Batch:
        """Random views of some images; without a generator their evaluation views."""
        if generator is None:
            views = self.images.pixels(list(indices), self.view).to(self.device)
        else:
            raw, sizes = self.decoded.batch(indices)
            scale, flip = self.recipe.scale, self.recipe.flip
            views = augment_batch(raw, self.size, generator, scale=scale, flip=flip, sizes=sizes)
        return self._labeled(views, indices)

    def _labeled(self, views: Tensor, indices: Sequence[int]) -> Batch:
        pixels = normalize(views, self.mean, self.std)
        return Batch(pixels, *self.labels_and_domains(indices), self.units_of(indices))

    def labels_and_domains(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Labels [b], or rows [b, C] of several, and, where there are any, domain numbers [b]."""
        # Copied from the host without waiting for the device: nothing in a step may.
        rows = torch.tensor(list(indices)).to(self.device, non_blocking=True)
        return self.labels[rows], None if self.domains is None else self.domains[rows]

    def units_of(self, indices: Sequence[int]) -> Tensor | None:
        """The units [b] of some images, on the CPU; None: not searched."""
        return None if self.units is None else self.units[list(indices)]

    def order(self, epoch: int) -> list[int]:
        """The order of the images in epoch `epoch` (from 0)."""
        if self._order[0] != epoch:
            generator = seeded_generator(self.recipe.seed, "order", epoch)
            self._order = (epoch, torch.randperm(len(self.images), generator=generator).tolist())
        return self._order[1]

    def at(self, step: int) -> Batch:
        """The batch of a training step (from 0)."""
        return self.span(step, step + 1)[0]

    def indices(self, step: int) -> list[int]:
        """The images of a training step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.recipe.batch
        return self.order(epoch)[start : start + self.recipe.batch]

    def views(self, indices: Sequence[int], view: int | None) -> Batch:
        """Random view number `view` of some images, by the image alone; None: the evaluation view."""
        if view is None:
            return self.batch(indices, None)
        raw, sizes = self.decoded.batch(indices)
        draws = [
            self._boxes(size[None], seeded_generator(self.recipe.seed, f"view {view}", index))
            for index, size in zip(indices, sizes, strict=True)
        ]
        return self._cropped(raw, draws, indices)

    def span(self, first: int, last: int) -> tuple[Batch, list[int]]:
        """The batches of steps `first` to `last` - 1 as one, and the images of each; the views of `at`."""
        steps = [self.indices(step) for step in range(first, last)]
        counts, indices = [len(step) for step in steps], [index for step in steps for index in step]
        if not self.recipe.augment:
            return self.batch(indices, None), counts
        raw, sizes = self.decoded.batch(indices)
        draws = [
            self._boxes(part, seeded_generator(self.recipe.seed, "views", step))
            for step, part in enumerate(sizes.split(counts), first)
        ]
        return self._cropped(raw, draws, indices), counts

    def _boxes(self, sizes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return sample_boxes(sizes, generator, self.recipe.scale, flip=self.recipe.flip)

    def _cropped(self, raw: Tensor, draws: Sequence[tuple[Tensor, Tensor]], indices: Sequence[int]) -> Batch:
        boxes, flips = (
            torch.cat(part).to(self.device, non_blocking=True) for part in zip(*draws, strict=True)
        )
        return self._labeled(crop_batch(raw, boxes, flips, self.size), indices)

    def batches(self, augment: bool = False) -> Iterator[Batch]:
        """Iterate over the set once in order, for `Method.prepare`; every iteration has new views.

        On a GPU more images than a training step has are computed at once: small batches would only wait.
        """
        self._passes += 1
        for start in range(0, len(self.images), self.prepare_batch):
            indices = range(start, min(start + self.prepare_batch, len(self.images)))
            generator = None
            if augment and self.recipe.augment:
                generator = seeded_generator(self.recipe.seed, f"walk {self._passes}", start)
            yield self.batch(indices, generator)
