"""Features of images and the contributions of their heads, collected in one pass over the images."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.data.batches import Pixels, over_pixels
from dear.errors import UsageError
from dear.heads.contributions import check_layers, head_maps, head_outputs
from dear.heads.names import Head


@dataclass(frozen=True)
class HeadContributions:
    """Features of n images and the contributions of their heads."""

    features: Tensor  #: [n, E]
    outputs: Tensor  #: [n, L, H, d], the heads' small form (see `contributions`)
    maps: Tensor  #: [L, H, d, E]
    layers: tuple[int, ...]  #: the L layers, counted from 1

    def change(self, heads: Iterable[Head], mean: Tensor | None = None) -> Tensor:
        """The change of the features when `heads` are mean-ablated, [n, E], by the `mean` [L, H, d]."""
        center = self.outputs.mean(dim=0) if mean is None else mean  # [L, H, d]
        return self._sum(heads, center - self.outputs)

    def contribution(self, heads: Iterable[Head]) -> Tensor:
        """The summed contribution of `heads`, [n, E]."""
        return self._sum(heads, self.outputs)

    def _sum(self, heads: Iterable[Head], outputs: Tensor) -> Tensor:
        total = torch.zeros_like(self.features)
        for layer, head in heads:
            if layer not in self.layers or not 0 <= head < self.outputs.shape[2]:
                raise UsageError(f"head ({layer}, {head}) was not collected; layers {self.layers} were")
            row = self.layers.index(layer)
            total += outputs[:, row, head] @ self.maps[row, head]
        return total

    def subset(self, rows: Tensor) -> HeadContributions:
        """The images at `rows`: numbers, or bool [n]."""
        return HeadContributions(self.features[rows], self.outputs[rows], self.maps, self.layers)


def collect_contributions(
    clip: Clip,
    images: Pixels,
    layers: Iterable[int] | None = None,
    batch_size: int = 64,
    progress: Callable[[int], None] | None = None,
) -> HeadContributions:
    """Run the images once and keep what ablations need (d values per head and image)."""
    chosen = check_layers(clip, layers)

    def compute(pixels: Tensor) -> tuple[Tensor, Tensor]:
        result = head_outputs(clip, pixels, chosen)
        return result.features.cpu(), result.outputs.cpu()

    def report(stage: str, done: int, total: int | None) -> None:
        if progress is not None:
            progress(done)

    parts, _ = over_pixels(images, compute, clip, progress=report, batch=batch_size)
    if not parts:
        raise UsageError("collecting contributions needs at least one image, got none")
    features, outputs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return HeadContributions(features, outputs, head_maps(clip, chosen).cpu(), chosen)
