"""Mean-ablation: accuracy when the contributions of heads are replaced by their mean over the images.

The *direct* effect: a head's contribution to the feature is replaced by its mean over the images, and
everything else stays as it is. Since the feature is the sum of contributions, that is a subtraction: no
image runs through the tower again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.data.batches import Pixels, over_pixels
from dear.errors import UsageError
from dear.heads.contributions import check_layers, head_maps, head_outputs
from dear.heads.names import KINDS, Head
from dear.heads.roles import RoleMap
from dear.utils.text import fill_template


@dataclass(frozen=True)
class Collected:
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
            place = self.layers.index(layer)
            total += outputs[:, place, head] @ self.maps[place, head]
        return total


def collect(
    clip: Clip,
    images: Pixels,
    layers: Iterable[int] | None = None,
    batch_size: int = 64,
    progress: Callable[[int], None] | None = None,
) -> Collected:
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
    return Collected(features, outputs, head_maps(clip, chosen).cpu(), chosen)


@dataclass(frozen=True)
class AblationTask:
    """A zero-shot classification task: collected images, their labels [n] and class features [C, E]."""

    images: Collected
    labels: Tensor
    classes: Tensor

    def accuracy(self, heads: Iterable[Head] = ()) -> float:
        """Share of images classified correctly with `heads` mean-ablated."""
        return float((self._scores(heads).argmax(dim=1) == self.labels).float().mean())

    def _scores(self, heads: Iterable[Head]) -> Tensor:
        """Cosines of the images with the classes, [n, C]."""
        heads, features = tuple(heads), self.images.features
        if heads:
            features = features + self.images.change(heads)
        unit = torch.nn.functional.normalize
        return unit(features, dim=-1) @ unit(self.classes.float().cpu(), dim=-1).T


def task(
    clip: Clip,
    images: Pixels,
    labels: Tensor,
    classes: Sequence[str],
    template: str = "a photo of a {}.",
    layers: Iterable[int] | None = None,
    batch_size: int = 64,
) -> AblationTask:
    """Collect a labeled image set for ablations of zero-shot accuracy."""
    words = clip.encode_text([fill_template(template, name) for name in classes]).float().cpu()
    return AblationTask(collect(clip, images, layers, batch_size), labels.cpu(), words)


def layer_effects(task: AblationTask) -> list[dict[str, float]]:
    """Direct effect of each collected layer, to show why the last layers are the ones with roles.

    A row per layer: `layer`, `accuracy` with that layer's heads mean-ablated, and `accuracy_up_to` with the
    heads of all layers up to it mean-ablated.
    """
    count = task.images.outputs.shape[2]
    rows, before = [], []
    for layer in task.images.layers:
        here = [(layer, head) for head in range(count)]
        before += here
        rows.append(
            {"layer": layer, "accuracy": task.accuracy(here), "accuracy_up_to": task.accuracy(before)}
        )
    return rows


def role_effects(task: AblationTask, roles: RoleMap, seeds: int = 10) -> list[dict[str, Any]]:
    """Accuracy with each kind of head, and each concept's heads, mean-ablated.

    A row each: `kind`, `concept` (None for the whole kind), `heads`, `accuracy`, and `control`, the mean
    accuracy when as many random heads of the same layers are ablated instead (`seeds` draws).
    """
    groups: list[tuple[str, str | None]] = [(kind, None) for kind in KINDS]
    groups += [("core", concept) for concept in roles.core]
    groups += [("other", concept) for concept in roles.concept_counts("other")]
    rows: list[dict[str, Any]] = []
    for kind, concept in groups:
        heads = roles.select(kind, concept)
        if heads:
            rows.append(
                {
                    "kind": kind,
                    "concept": concept,
                    "heads": len(heads),
                    "accuracy": task.accuracy(heads),
                    "control": sum(map(task.accuracy, random_heads(task, heads, seeds))) / seeds,
                }
            )
    return rows


def random_heads(task: AblationTask, heads: Sequence[Head], seeds: int) -> list[list[Head]]:
    """`seeds` draws of as many random heads as `heads`, in the same layers.

    Layers differ much more in what they are worth than heads of a layer do; heads drawn from all layers
    would mostly measure in which layers a role is.
    """
    every = task.images.outputs.shape[2]
    layers = Counter(layer for layer, _ in heads)

    def draw(rng: torch.Generator) -> list[Head]:
        return [
            (layer, head)
            for layer, count in sorted(layers.items())
            for head in torch.randperm(every, generator=rng)[:count].tolist()
        ]

    return [draw(torch.Generator().manual_seed(seed)) for seed in range(seeds)]
