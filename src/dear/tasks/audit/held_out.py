"""A model on held-out images: its scores, the same with a concept removed, and its worst group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.data.images import ImageSet, even_subset, group_names
from dear.heads.collect import HeadContributions, collect_contributions
from dear.methods.frozen import Frozen
from dear.runs.evaluation import Evaluation
from dear.runs.model import Model
from dear.shortcuts.removal import Removal
from dear.tasks.audit.reliance import Reliance, reliance
from dear.tasks.audit.several_labels import members
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
    collected: HeadContributions | None  # of these images, where the method reads the feature alone
    mode: str

    @classmethod
    def of(
        cls, model: Model, images: ImageSet, layers: Sequence[int], mode: str | None, progress: Progress
    ) -> HeldOutScores:
        """Run the model on the images, or on an even part of many."""
        method = model.method
        quick = method.cut == "feature" and method.clip.correction is None and not method.focus
        images = even_subset(images, HELD_OUT if quick else INSIDE)
        model, labels = (model if method.several else Model(method)).for_labels(images)
        mode = model.pick_mode(mode)
        if not quick:
            scores = _above_limits(model, model.logits(images, progress=progress)[mode], mode)
            return cls(model, images, labels, scores, None, mode)
        collected = collect_contributions(
            method.clip, images, layers, progress=lambda done: progress("held-out images", done, len(images))
        )
        return cls(model, images, labels, _from_features(model, collected.features, mode), collected, mode)

    @property
    def quick(self) -> bool:
        """Whether a removal costs nothing but a product."""
        return self.collected is not None

    @property
    def answers(self) -> Tensor:
        """The model's answers [m]; of several labels whether each is answered, bool [m, C]."""
        return self.scores >= 0 if self.model.method.several else self.scores.argmax(dim=1)

    def scores_without(self, ways: Mapping[str, Removal]) -> dict[str, Tensor]:
        """Scores [m, C] with a concept removed, in each way."""
        scores = {}
        for way, removal in ways.items():
            if way == "leace":
                continue
            if self.collected is not None:
                scores[way] = _from_features(self.model, removal.apply(self.collected), self.mode)
            else:
                logits = without(self.model, removal).logits(self.images)[self.mode]
                scores[way] = _above_limits(self.model, logits, self.mode)
        return scores

    def relevant(self, label: str) -> Tensor:
        """Which images have a label or are answered with it, bool [m]; "" (one label per image): all."""
        if not label:
            return torch.ones(len(self.images), dtype=torch.bool)
        has = members(self.images, self.images.classes.index(label))
        return has | self.answers[:, self.model.classes.index(label)]

    def effect(self, scores: Mapping[str, Tensor], label: str = "") -> tuple[str, Reliance, Tensor]:
        """The way to remove a concept with the largest effect, the reliance, and the answers without it [m].

        Of several labels: on the answers about one, for images that have it or are answered with it.
        """
        effects = []
        for way, after in scores.items():
            if not label:
                effects.append((way, reliance(self.scores, after, self.labels, way), after.argmax(dim=1)))
                continue
            column, rows = self.model.classes.index(label), self.relevant(label)
            has = members(self.images, self.images.classes.index(label))
            before, now = (_with_zero(each[rows, column]) for each in (self.scores, after))
            used = reliance(before, now, (~has[rows]).long(), way)
            effects.append((way, used, after[:, column] >= 0))
        return max(effects, key=lambda effect: effect[1].strength)

    @property
    def worst_group(self) -> tuple[str, float] | None:
        """The group of class and value with the lowest accuracy; None where no values are known."""
        if self.model.method.several:
            return None
        groups = Evaluation(
            self.model.classes, self.labels, {self.mode: self.answers}, {}, groups=group_names(self.images)
        ).per_group()
        return min(groups.items(), key=lambda pair: pair[1]) if groups else None


@torch.no_grad()
def _from_features(model: Model, features: Tensor, mode: str) -> Tensor:
    logits = model.method.logits_from_frozen(Frozen(features.to(model.clip.device)))[mode].float().cpu()
    return _above_limits(model, logits, mode)


def _above_limits(model: Model, logits: Tensor, mode: str) -> Tensor:
    """Logits [m, C]; of several labels calibrated, above the logit from which an image has the label."""
    if not model.method.several:
        return logits
    calibrator = model.calibrator
    return (
        calibrator.calibrate(logits, mode) - calibrator.label_thresholds(mode).clamp(1e-6, 1 - 1e-6).logit()
    )


def _with_zero(scores: Tensor) -> Tensor:
    """Scores [m] of a label compared with its absence, [m, 2]."""
    return torch.stack([scores, torch.zeros_like(scores)], dim=1)


def without(model: Model, removal: Removal) -> Model:
    """A model with something removed from its image feature, without training again."""
    return model.with_correction(removal.correction(after=model.clip.correction))
