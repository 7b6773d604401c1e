"""Images per second from files to training views on the device: our feed and a PyTorch DataLoader."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.data import ImageSet
from dear.images.views import normalize
from dear.runs.recipe import Recipe
from dear.train.crops import augment_image
from dear.train.feed import Feed
from dear.train.frozen import steps_at_once
from measure.clock import seconds, wait


def feed_rates(
    data: ImageSet, clip: Clip, batch: int = 32, epochs: int = 3, workers: tuple[int, ...] = (8,)
) -> list[dict[str, Any]]:
    """One row per epoch and way: our feed, and a DataLoader with Pillow transforms and worker processes.

    Epochs of one way follow each other: a GPU that waits for worker processes lowers its clock.
    """
    recipe = Recipe(batch=batch)
    feed = Feed(data, clip, recipe)
    _ours(Feed(data.subset(range(min(batch, len(data)))), clip, recipe), 0)  # libraries are loaded
    ways: dict[str, Any] = {"dear": lambda epoch: _ours(feed, epoch)}
    for number in workers:
        loader = torch.utils.data.DataLoader(
            _Plain(data, clip, recipe),
            batch_size=batch,
            shuffle=True,
            num_workers=number,
            pin_memory=clip.device.type == "cuda",
            persistent_workers=number > 0,
        )
        ways[f"DataLoader, {number} workers"] = lambda epoch, loader=loader: _theirs(loader, clip.device)
    rows = []
    for name, way in ways.items():
        for epoch in range(1, epochs + 1):
            wait(clip.device)
            taken = seconds(lambda way=way, epoch=epoch: way(epoch - 1))
            row = {"way": name, "epoch": epoch, "images": len(data), "seconds": round(taken, 4)}
            rows.append({**row, "images_per_s": round(len(data) / taken, 1)})
    return rows


def _ours(feed: Feed, epoch: int) -> None:
    steps = feed.steps_per_epoch
    group = steps_at_once(feed.size, feed.recipe.batch)
    for first in range(epoch * steps, (epoch + 1) * steps, group):
        feed.span(first, min(first + group, (epoch + 1) * steps))


def _theirs(loader: Any, device: torch.device) -> None:
    for pixels, labels in loader:
        pixels.to(device, non_blocking=True)
        labels.to(device, non_blocking=True)


class _Plain(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """What the field's loaders do: decode with Pillow, crop, resize, flip and norm, image by image."""

    def __init__(self, data: Any, clip: Clip, recipe: Recipe) -> None:
        self.data, self.size = data, clip.config.vision.image_size
        self.mean, self.std, self.scale = clip.config.mean, clip.config.std, recipe.scale

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31 + index)
        view = augment_image(self.data.image(index), self.size, generator, scale=self.scale)
        return normalize(view, self.mean, self.std), int(self.data.labels[index])
