"""A model on held-out images: its scores, the same with a concept removed, and its worst group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.data.images import ImageSet, even_subset, group_names
from dear.heads.ablate import Collected, collect
from dear.methods.base import Method
from dear.runs.evaluate import Evaluation
from dear.runs.model import Model
from dear.shortcuts.removal import Repair
from dear.tasks.audit.concepts import Reliance, reliance
from dear.utils.progress import Progress

HELD_OUT = 300  #: held-out images at most
INSIDE = 96  #: the same for a method that learns inside the tower, which answers anew for every concept


@dataclass(frozen=True, eq=False)
class HeldOutScores:
    """A model and its scores for held-out images."""

    model: Model
    images: ImageSet
    labels: Tensor
    scores: Tensor  # [m, C]
    collected: Collected | None  # of these images, where the method reads the feature alone
    mode: str

    @classmethod
    def of(
        cls, method: Method, images: ImageSet, layers: Sequence[int], mode: str | None, progress: Progress
    ) -> HeldOutScores:
        """Run the model on the images, or on an even part of many."""
        quick = method.cut == "feature" and method.clip.correction is None and not method.clip.focus
        images = even_subset(images, HELD_OUT if quick else INSIDE)
        model, labels = Model(method).for_labels(images)
        mode = model.pick_mode(mode)
        if not quick:
            return cls(model, images, labels, model.logits(images, progress=progress)[mode], None, mode)
        collected = collect(
            method.clip, images, layers, progress=lambda done: progress("held-out images", done, len(images))
        )
        return cls(model, images, labels, _from_features(model, collected.features, mode), collected, mode)

    @property
    def quick(self) -> bool:
        """Whether a removal costs nothing but a product."""
        return self.collected is not None

    @property
    def answers(self) -> Tensor:
        """The model's answers [m]."""
        return self.scores.argmax(dim=1)

    def without(self, ways: Mapping[str, Repair]) -> tuple[Reliance, Tensor, Repair]:
        """The way to remove a concept with the largest effect: reliance, answers without it, removal."""
        effects = []
        for way, repair in ways.items():
            if way == "leace":
                continue
            if self.collected is not None:
                scores = _from_features(self.model, repair.apply(self.collected), self.mode)
            else:
                scores = without(self.model, repair).logits(self.images)[self.mode]
            effects.append((reliance(self.scores, scores, self.labels, way), scores.argmax(dim=1), repair))
        return max(effects, key=lambda effect: max(effect[0].lost, effect[0].changed))

    @property
    def worst_group(self) -> tuple[str, float] | None:
        """The group of class and value with the lowest accuracy; None where no values are known."""
        groups = Evaluation(
            self.model.classes, self.labels, {self.mode: self.answers}, {}, groups=group_names(self.images)
        ).per_group()
        return min(groups.items(), key=lambda pair: pair[1]) if groups else None


@torch.no_grad()
def _from_features(model: Model, features: Tensor, mode: str) -> Tensor:
    return model.method.logits_from_frozen((features.to(model.clip.device),))[mode].float().cpu()


def without(model: Model, repair: Repair) -> Model:
    """A model with something removed from its image feature, without training again."""
    return model.corrected(repair.correction(after=model.clip.correction))
