"""Mean-ablation: accuracy when the contributions of heads are replaced by their mean over the images.

The *direct* effect: a head's contribution to the feature is replaced by its mean over the images, and
everything else stays as it is. Since the feature is the sum of contributions, that is a subtraction: no
image runs through the tower again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dear.heads.collect import HeadContributions
from dear.heads.names import KINDS, Head
from dear.heads.roles import RoleMap


@dataclass(frozen=True)
class AblationTask:
    """A zero-shot classification task: collected images, their labels [n] and class features [C, E]."""

    images: HeadContributions
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


def layer_effects(task: AblationTask) -> list[dict[str, float]]:
    """Direct effect of each collected layer, to show why the last layers are the ones with roles.

    A row per layer: `layer`, `accuracy` with that layer's heads mean-ablated, and `accuracy_up_to` with the
    heads of all layers up to it mean-ablated.
    """
    heads_per_layer = task.images.outputs.shape[2]
    rows, heads_so_far = [], []
    for layer in task.images.layers:
        heads = [(layer, head) for head in range(heads_per_layer)]
        heads_so_far += heads
        rows.append(
            {"layer": layer, "accuracy": task.accuracy(heads), "accuracy_up_to": task.accuracy(heads_so_far)}
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

    Layers differ much more in their effect than heads of a layer do: with heads drawn from all layers, the
    comparison would mostly measure in which layers a role is.
    """
    heads_per_layer = task.images.outputs.shape[2]
    layers = Counter(layer for layer, _ in heads)

    def draw(rng: torch.Generator) -> list[Head]:
        return [
            (layer, head)
            for layer, count in sorted(layers.items())
            for head in torch.randperm(heads_per_layer, generator=rng)[:count].tolist()
        ]

    return [draw(torch.Generator().manual_seed(seed)) for seed in range(seeds)]
