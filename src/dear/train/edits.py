"""Removing a property of images (brightness, a frame, a mark) from what a training learns.

Two ways: edited copies of the training images join the training, or the directions along which edits move the
feature are removed from it. Which one is better is asked by cross-validation on the training images: a linear
classifier must stay right on held-out images as they are and edited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.heads.repair import Repair
from dear.heads.without import Without
from dear.photos.copies import EditedImages
from dear.photos.directions import edit_directions
from dear.photos.edits import KINDS
from dear.photos.properties import measure
from dear.photos.shortcuts import Shortcut, find_shortcuts
from dear.runs.feature_cache import FeatureCache

WAYS = ("directions", "copies")  #: the simpler first: it folds into weights
CLOSE = 0.01  #: of accuracy: ways that are this near count as equal
FOLDS = 4


@dataclass(frozen=True, eq=False)
class EditPlan:
    """How properties are removed from a training."""

    kinds: tuple[str, ...]
    way: str
    #: of the frozen feature's linear classifier on held-out images as they are and edited, by way
    scores: Mapping[str, float]
    #: findings of these kinds in the training images
    shortcuts: tuple[Shortcut, ...]
    #: edited copies, in blocks as long as the training set
    copies: tuple[EditedImages, ...] = ()
    #: directions to remove from the feature; None: copies are trained on
    repair: Repair | None = None

    @property
    def title(self) -> str:
        """A few words for people."""
        if self.repair is not None:
            return self.repair.title
        return f"{', '.join(self.kinds)} by edited copies ({len(self.copies)} per image)"

    @property
    def notices(self) -> tuple[str, ...]:
        """What to know, one sentence each."""
        found = []
        for kind in self.kinds:
            if not any(one.kind == kind for one in self.shortcuts):
                found.append(f"No class of the training images stands out by {kind}; edits of it are random.")
        if self.scores and self.scores[self.way] <= self.scores["nothing"] + 0.005:
            found.append(
                f"A linear classifier hardly uses {', '.join(self.kinds)}: on edited images it is right in "
                f"{self.scores['nothing']:.1%} untouched, in {self.scores[self.way]:.1%} by {self.way}."
            )
        return tuple(found)


def split_without(without: Without) -> tuple[tuple[str, ...], Without | None]:
    """Kinds of properties, and the rest: concepts."""
    kinds = tuple(name for name in without.concepts if name in KINDS)
    concepts = tuple(name for name in without.concepts if name not in KINDS)
    if not concepts:
        return kinds, None
    if kinds and without.way in WAYS:
        raise UsageError(
            f"{concepts[0]} is a concept: {without.way} removes properties of images, {', '.join(KINDS)}"
        )
    return kinds, replace(without, concepts=concepts)


def plan_edits(
    clip: Clip, images: ImageSet, kinds: Sequence[str], way: str = "auto", seed: int = 1
) -> EditPlan:
    """Decide how to remove properties from a training on these images.

    Args:
        clip: the plain backbone.
        images: the training images.
        kinds: of the properties.
        way: "auto", "copies" or "directions".
        seed: of the edits.
    """
    if way not in ("auto", *WAYS):
        raise UsageError(
            f"{kinds[0]} is a property of images; it is removed by auto, {' or '.join(WAYS)}, not by {way}"
        )
    labels = images.labels
    found = find_shortcuts(measure(images), labels.tolist(), images.classes)
    shortcuts = tuple(one for one in found if one.kind in kinds)
    copies = [EditedImages(images, kind, seed=seed) for kind in kinds]
    copies += [EditedImages(images, one.kind, one, seed=seed) for one in shortcuts]
    cache = FeatureCache()
    seen = cache.image_features(clip, images)
    edited = torch.stack([cache.image_features(clip, each) for each in copies])  # [T, n, E]
    scores: dict[str, float] = {}
    if way == "auto":
        scores = {one: _score(one, seen, edited, labels) for one in ("nothing", *WAYS)}
        best = max(scores[one] for one in WAYS)
        way = next(one for one in WAYS if scores[one] >= best - CLOSE)
    plan = EditPlan(tuple(kinds), way, scores, shortcuts)
    if way == "copies":
        return replace(plan, copies=tuple(copies))
    basis = _basis(seen, edited)
    removed = (basis.T @ basis).to(seen)
    repair = Repair(tuple(kinds), ("edits",), seen.mean(dim=0), removed, rank=len(basis))
    return replace(plan, repair=repair)


def _basis(seen: Tensor, edited: Tensor) -> Tensor:
    return edit_directions(seen.repeat(len(edited), 1), edited.flatten(0, 1))


def _score(way: str, seen: Tensor, edited: Tensor, labels: Tensor) -> float:
    """Cross-validated accuracy of a logistic regression on images as they are and edited, half and half."""
    from sklearn.linear_model import LogisticRegression

    truth, right = labels.numpy(), []
    fold = np.zeros(len(truth), dtype=int)
    for label in np.unique(truth):
        members = np.flatnonzero(truth == label)
        fold[members] = np.arange(len(members)) % FOLDS
    for number in range(FOLDS):
        held = torch.from_numpy(fold == number)
        learn, mine = seen[~held], truth[fold != number]
        if not bool(held.any()) or len(np.unique(mine)) < 2:
            continue
        keep = torch.eye(seen.shape[1])
        if way == "directions":
            basis = _basis(learn, edited[:, ~held]).float()
            keep = keep - basis.T @ basis
        if way == "copies":
            learn, mine = torch.cat((learn, edited[:, ~held].flatten(0, 1))), np.tile(mine, 1 + len(edited))
        center = seen[~held].mean(dim=0)
        model = LogisticRegression(C=100, max_iter=200).fit(_read(learn, center, keep), mine)
        hits = [
            float((model.predict(_read(rows[held], center, keep)) == truth[fold == number]).mean())
            for rows in (seen, *edited)
        ]
        right.append((hits[0] + float(np.mean(hits[1:]))) / 2)
    return float(np.mean(right)) if right else 0.0


def _read(rows: Tensor, center: Tensor, keep: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Unit features with only some directions of the centered feature kept."""
    read: np.ndarray[Any, np.dtype[np.float32]] = F.normalize((rows - center) @ keep + center, dim=-1).numpy()
    return read
