"""Chooses how to remove a property of images: by directions, heads, or edited copies.

The training images are divided into folds. A linear classifier on frozen features is trained on all folds but
one with one way of removal, and predicts the images of that fold, unchanged and edited: how many predictions
does the edit move to the class that has the property? Every removal is compared with the same number of
random directions or heads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dear.data.folds import IntArray, feature_folds
from dear.heads.collect import HeadContributions
from dear.heads.names import Head
from dear.shortcuts.directions import edit_directions, random_directions
from dear.shortcuts.removal import Removal, remove_heads
from dear.shortcuts.trials import FOLDS, Labels, choose_simplest, fit_classifier, unit_features

DRAWS = 3  #: random removals to compare with
COUNTS = (2, 4, 8)  #: candidates for the number of directions
HEADS_SHARE = 0.5  #: removed heads carry at least this fraction of the heads' part in the edits' mean shift
CLOSE = 0.01  #: costs (fractions of the predictions) that differ by less are equal

#: the simplest first: directions fold into weights, heads need no copies
WAYS = ("directions", "heads", "copies")


@dataclass(frozen=True)
class Trial:
    """Results of a linear classifier on held-out training images."""

    #: accuracy on unchanged images, except those of the class with the property: a classifier may recognize
    #: these by the property itself, so that any removal seems to do harm
    accuracy: float
    #: fraction of predictions that edits move to the class with the property or, without one, make wrong
    moved: float


@dataclass(frozen=True, eq=False)
class EditedFeatures:
    """Features of n training images and of their edited copies."""

    original: HeadContributions
    copies: tuple[HeadContributions, ...]
    labels: Tensor
    #: for each copy, the class whose property was transferred to it; -1: it was edited at random
    toward: tuple[int, ...]
    units: IntArray | None = None  #: [n], equal for copies of an image; None: images with equal features

    def subset(self, rows: Tensor) -> EditedFeatures:
        """The features of the images with `rows` true, bool [n]."""
        original, *copies = (images.subset(rows) for images in (self.original, *self.copies))
        units = None if self.units is None else self.units[rows.numpy()]
        return EditedFeatures(original, tuple(copies), self.labels[rows], self.toward, units)

    def shift(self) -> tuple[Tensor, Tensor]:
        """Features before and after the edits, [copies x n, E] each."""
        edited = torch.cat([copy.features for copy in self.copies])
        return self.original.features.repeat(len(self.copies), 1), edited  # [n, E] -> [copies x n, E]

    @property
    def heads(self) -> list[Head]:
        """All heads whose outputs were collected."""
        return [
            (layer, head) for layer in self.original.layers for head in range(self.original.outputs.shape[2])
        ]


def remove_directions(edited: EditedFeatures, kinds: Sequence[str], count: int) -> Removal:
    """Remove the directions in which edits move the feature."""
    return _span(edited, kinds, edit_directions(*edited.shift(), count))


def remove_random_directions(edited: EditedFeatures, kinds: Sequence[str], count: int, seed: int) -> Removal:
    """Remove random directions, to compare with."""
    return _span(edited, kinds, random_directions(edited.original.features.shape[1], count, seed))


def _span(edited: EditedFeatures, kinds: Sequence[str], basis: Tensor) -> Removal:
    features = edited.original.features
    removed = (basis.T @ basis).to(features)
    return Removal(tuple(kinds), ("edits",), features.mean(dim=0), removed, rank=len(basis))


def edit_heads(edited: EditedFeatures) -> tuple[Head, ...]:
    """The heads that together carry `HEADS_SHARE` of the heads' part in the mean shift of the edits."""
    before, after = edited.shift()
    direction = F.normalize((after - before).mean(dim=0), dim=-1)  # [E]
    outputs = torch.stack([copy.outputs.mean(dim=0) for copy in edited.copies]).mean(dim=0)  # [L, H, d]
    change = outputs - edited.original.outputs.mean(dim=0)  # [L, H, d]
    by_head = torch.einsum("lhd,lhde,e->lh", change, edited.original.maps, direction)
    shift = by_head.flatten().clamp(min=0)  # [L, H] -> [L H]
    order = shift.argsort(descending=True)
    cumulative = shift[order].cumsum(0) / shift.sum().clamp(min=1e-12)
    count = min(int((cumulative < HEADS_SHARE).sum()) + 1, max(1, len(order) // 3))
    return tuple(sorted(edited.heads[index] for index in order[:count].tolist()))


def remove_edit_heads(edited: EditedFeatures, kinds: Sequence[str]) -> Removal:
    """Remove the contributions of the heads that react most to the edits."""
    return remove_heads(edited.original, edit_heads(edited), ", ".join(kinds))


def remove_random_heads(edited: EditedFeatures, kinds: Sequence[str], count: int, seed: int) -> Removal:
    """Remove the contributions of random heads, to compare with."""
    return remove_heads(edited.original, random.Random(seed).sample(edited.heads, count), ", ".join(kinds))


@dataclass(frozen=True)
class EditChoice:
    """The chosen way to remove a property, and the results of all ways on held-out images."""

    way: str
    directions: int  #: number of directions of the removal by directions
    trials: Mapping[str, Trial]  #: by way, and "nothing"
    random: Trial | None  #: mean over random removals with as many directions or heads; None for copies


def choose_edit_removal(edited: EditedFeatures, kinds: Sequence[str]) -> EditChoice | None:
    """The way that minimizes predictions moved by edits plus accuracy lost on unchanged images.

    None where no image can be held out, because every class has one.
    """
    if not any(_folds(edited)):
        return None
    counts = [count for count in COUNTS if count <= min(edited.original.features.shape)]
    by_count = {
        count: _trial(edited, partial(remove_directions, kinds=kinds, count=count)) for count in counts
    }
    nothing = _trial(edited)
    directions = int(_cheapest({str(count): trial for count, trial in by_count.items()}, nothing))
    trials = {
        "nothing": nothing,
        "directions": by_count[directions],
        "heads": _trial(edited, partial(remove_edit_heads, kinds=kinds)),
        "copies": _trial(edited, copies=True),
    }
    way = _cheapest({name: trials[name] for name in WAYS}, nothing)
    if way == "copies":
        return EditChoice(way, directions, trials, None)
    if way == "directions":
        remove_random: Any = partial(remove_random_directions, kinds=kinds, count=directions)
    else:
        remove_random = partial(remove_random_heads, kinds=kinds, count=len(edit_heads(edited)))
    draws = [_trial(edited, partial(remove_random, seed=seed)) for seed in range(DRAWS)]
    accuracy, moved = np.mean([(draw.accuracy, draw.moved) for draw in draws], axis=0).tolist()
    return EditChoice(way, directions, trials, Trial(accuracy, moved))


def _cheapest(trials: Mapping[str, Trial], nothing: Trial) -> str:
    """Name of the simplest trial among those with nearly the lowest cost."""
    costs = {
        name: trial.moved + max(0.0, nothing.accuracy - trial.accuracy) for name, trial in trials.items()
    }
    return choose_simplest(costs, CLOSE)


def _trial(edited: EditedFeatures, remove: Any = None, copies: bool = False) -> Trial:
    """Cross-validated results with a removal, or with edited copies in the training."""
    accuracies, moved = [], []
    for train, test in _folds(edited):
        removal = None if remove is None else remove(train)
        rows, labels = unit_features(removal, train.original), train.labels.numpy()
        if copies:
            rows = np.concatenate([rows, *(unit_features(removal, copy) for copy in train.copies)])
            labels = np.tile(labels, 1 + len(train.copies))
        predict = fit_classifier(rows, labels)
        truth = test.labels.numpy()
        unchanged = predict(unit_features(removal, test.original))
        without_property = ~np.isin(truth, [label for label in test.toward if label >= 0])
        correct = (unchanged == truth)[without_property]
        accuracies.append(float(correct.mean()) if len(correct) else 1.0)
        predictions = [predict(unit_features(removal, copy)) for copy in test.copies]
        moved.append(_moved_fraction(test, unchanged, predictions))
    return Trial(float(np.mean(accuracies)), float(np.mean(moved)))


def _moved_fraction(test: EditedFeatures, unchanged: Labels, predictions: Sequence[Labels]) -> float:
    """`Trial.moved`, from predictions [n] for unchanged images and for each edited copy."""
    truth, fractions = test.labels.numpy(), []
    has_transfers = any(label >= 0 for label in test.toward)
    for label, edited in zip(test.toward, predictions, strict=True):
        if label >= 0:
            others = truth != label
            fractions.append(float((edited[others] == label).mean() - (unchanged[others] == label).mean()))
        elif not has_transfers:
            fractions.append(float((unchanged == truth).mean() - (edited == truth).mean()))
    return max(0.0, float(np.mean(fractions)))


def _folds(edited: EditedFeatures) -> Iterator[tuple[EditedFeatures, EditedFeatures]]:
    """Training and test part of each fold; the images of a class are divided evenly over the folds."""
    fold = feature_folds(edited.original.features, edited.labels, FOLDS, edited.units)
    for number in range(FOLDS):
        test = fold == number
        if bool(test.any()) and len(edited.labels[~test].unique()) > 1:
            yield edited.subset(~test), edited.subset(test)
