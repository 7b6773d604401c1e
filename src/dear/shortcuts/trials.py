"""Which way removes a property of images best, by the causal test on images that were held out.

The training images are divided into folds. A linear classifier on frozen features learns from all folds but
one, with one way of removal; on the images of that fold it answers the images as they are and edited:
how many answers does the edit bring to the class that has the property? Every removal is compared with as
many random directions or heads.
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

from dear.data.folds import Places, feature_folds
from dear.heads.ablate import Collected
from dear.heads.names import Head
from dear.shortcuts.directions import edit_directions, random_directions
from dear.shortcuts.removal import Repair, remove_heads

FOLDS = 4
DRAWS = 3  #: of as many random directions or heads
COUNTS = (2, 4, 8)  #: directions that are tried
HALF = 0.5  #: of what all heads add to the edit's mean shift: the heads that are removed carry this much
CLOSE = 0.01  #: of the answers: ways that are this near count as equal

#: the simplest first: directions fold into weights, heads need no copies
WAYS = ("directions", "heads", "copies")


@dataclass(frozen=True)
class Trial:
    """What a linear classifier answers on held-out training images."""

    #: on the images as they are, but for those of the class with the property: they have it here, and the
    #: more a way removes it, the fewer of them are answered by it
    accuracy: float
    #: share of answers that edits bring to the class that has the property; without one, that they make wrong
    moved: float


@dataclass(frozen=True, eq=False)
class EditedFeatures:
    """Features of n training images as they are and of their edited copies."""

    original: Collected
    copies: tuple[Collected, ...]
    labels: Tensor
    #: of each copy the class whose property it was given; -1: it was edited at random
    toward: tuple[int, ...]
    units: Places | None = None  #: [n]; copies of an image have the same. None: those with equal features

    def subset(self, rows: Tensor) -> EditedFeatures:
        """The same of some images, bool [n]."""
        original, *copies = (
            Collected(each.features[rows], each.outputs[rows], each.maps, each.layers)
            for each in (self.original, *self.copies)
        )
        units = None if self.units is None else self.units[rows.numpy()]
        return EditedFeatures(original, tuple(copies), self.labels[rows], self.toward, units)

    def shift(self) -> tuple[Tensor, Tensor]:
        """Features [copies x n, E] as they are, and edited."""
        edited = torch.cat([each.features for each in self.copies])
        return self.original.features.repeat(len(self.copies), 1), edited

    @property
    def heads(self) -> list[Head]:
        """Every head that was collected."""
        return [
            (layer, head) for layer in self.original.layers for head in range(self.original.outputs.shape[2])
        ]


def directions_removed(seen: EditedFeatures, kinds: Sequence[str], count: int) -> Repair:
    """Removal of the directions along which edits move the feature."""
    return _span(seen, kinds, edit_directions(*seen.shift(), count))


def random_directions_removed(seen: EditedFeatures, kinds: Sequence[str], count: int, seed: int) -> Repair:
    """Removal of as many random directions."""
    return _span(seen, kinds, random_directions(seen.original.features.shape[1], count, seed))


def _span(seen: EditedFeatures, kinds: Sequence[str], basis: Tensor) -> Repair:
    features = seen.original.features
    removed = (basis.T @ basis).to(features)
    return Repair(tuple(kinds), ("edits",), features.mean(dim=0), removed, rank=len(basis))


def edit_heads(seen: EditedFeatures) -> tuple[Head, ...]:
    """The heads that together carry half of what all heads add to the mean shift of the edits."""
    before, after = seen.shift()
    mean = F.normalize((after - before).mean(dim=0), dim=-1)
    outputs = torch.stack([each.outputs.mean(dim=0) for each in seen.copies]).mean(dim=0)
    change = outputs - seen.original.outputs.mean(dim=0)  # [L, H, d]
    share = torch.einsum("lhd,lhde,e->lh", change, seen.original.maps, mean).flatten().clamp(min=0)
    order = share.argsort(descending=True)
    reached = share[order].cumsum(0) / share.sum().clamp(min=1e-12)
    count = min(int((reached < HALF).sum()) + 1, max(1, len(order) // 3))
    return tuple(sorted(seen.heads[place] for place in order[:count].tolist()))


def heads_removed(seen: EditedFeatures, kinds: Sequence[str]) -> Repair:
    """Removal of what the heads add that react to the edits most."""
    return remove_heads(seen.original, edit_heads(seen), ", ".join(kinds))


def random_heads_removed(seen: EditedFeatures, kinds: Sequence[str], count: int, seed: int) -> Repair:
    """Removal of what as many random heads add."""
    return remove_heads(seen.original, random.Random(seed).sample(seen.heads, count), ", ".join(kinds))


@dataclass(frozen=True)
class EditChoice:
    """The way that was chosen, and what each did to held-out images."""

    way: str
    directions: int  #: how many, of removal by directions
    trials: Mapping[str, Trial]  #: by way, and "nothing"
    random: Trial | None  #: the same for as many random directions or heads, mean of the draws


def choose(seen: EditedFeatures, kinds: Sequence[str]) -> EditChoice:
    """The way with the fewest answers moved by edits and lost on images as they are, together."""
    counts = [count for count in COUNTS if count <= min(seen.original.features.shape)]
    tried = {count: _trial(seen, partial(directions_removed, kinds=kinds, count=count)) for count in counts}
    nothing = _trial(seen)
    directions = int(_best({str(count): trial for count, trial in tried.items()}, nothing))
    trials = {
        "nothing": nothing,
        "directions": tried[directions],
        "heads": _trial(seen, partial(heads_removed, kinds=kinds)),
        "copies": _trial(seen, copies=True),
    }
    way = _best({name: trials[name] for name in WAYS}, nothing)
    if way == "copies":
        return EditChoice(way, directions, trials, None)
    count, remove = (
        (directions, random_directions_removed)
        if way == "directions"
        else (len(edit_heads(seen)), random_heads_removed)
    )
    drawn = [_trial(seen, partial(remove, kinds=kinds, count=count, seed=seed)) for seed in range(DRAWS)]
    accuracy, moved = np.mean([(one.accuracy, one.moved) for one in drawn], axis=0).tolist()
    return EditChoice(way, directions, trials, Trial(accuracy, moved))


def _best(trials: Mapping[str, Trial], nothing: Trial) -> str:
    """The first, in order of simplicity, of those that count as best."""
    harm = {name: one.moved + max(0.0, nothing.accuracy - one.accuracy) for name, one in trials.items()}
    return simplest(harm, CLOSE)


def simplest(costs: Mapping[str, float], margin: float) -> str:
    """The first candidate, in order of simplicity, whose cost is within `margin` of the lowest.

    >>> simplest({"words": 0.12, "heads": 0.1, "copies": 0.3}, 0.03)
    'words'
    """
    return next(name for name in costs if costs[name] <= min(costs.values()) + margin)


def _trial(seen: EditedFeatures, remove: Any = None, copies: bool = False) -> Trial:
    """Held-out accuracy and answers moved by edits, with a removal, or with copies in the training."""
    right, moved = [], []
    for learn, held in _folds(seen):
        repair = None if remove is None else remove(learn)
        rows, labels = unit_features(repair, learn.original), learn.labels.numpy()
        if copies:
            rows = np.concatenate([rows, *(unit_features(repair, each) for each in learn.copies)])
            labels = np.tile(labels, 1 + len(learn.copies))
        answer = classifier(rows, labels)
        truth = held.labels.numpy()
        plain = answer(unit_features(repair, held.original))
        usual = ~np.isin(truth, [label for label in held.toward if label >= 0])
        right.append(float((plain == truth)[usual].mean()) if usual.any() else 1.0)
        moved.append(_moved(held, plain, [answer(unit_features(repair, each)) for each in held.copies]))
    return Trial(float(np.mean(right)), float(np.mean(moved))) if right else Trial(0.0, 0.0)


def _moved(held: EditedFeatures, plain: Labels, edited: Sequence[Labels]) -> float:
    truth, shares = held.labels.numpy(), []
    aimed = any(label >= 0 for label in held.toward)
    for label, answers in zip(held.toward, edited, strict=True):
        if label >= 0:
            others = truth != label
            shares.append(float((answers[others] == label).mean() - (plain[others] == label).mean()))
        elif not aimed:
            shares.append(float((plain == truth).mean() - (answers == truth).mean()))
    return max(0.0, float(np.mean(shares)))


def _folds(seen: EditedFeatures) -> Iterator[tuple[EditedFeatures, EditedFeatures]]:
    """What is learned from and what is held out, each class divided evenly."""
    fold = feature_folds(seen.original.features, seen.labels, FOLDS, seen.units)
    for number in range(FOLDS):
        held = fold == number
        if bool(held.any()) and len(seen.labels[~held].unique()) > 1:
            yield seen.subset(~held), seen.subset(held)


Labels = np.ndarray[Any, np.dtype[np.int64]]
Rows = np.ndarray[Any, np.dtype[np.float32]]


def unit_features(repair: Repair | None, images: Collected) -> Rows:
    """Unit features with a removal."""
    features = images.features if repair is None else repair.apply(images)
    rows: Rows = F.normalize(features, dim=-1).numpy()
    return rows


def classifier(rows: Rows, labels: Labels) -> Any:
    """A logistic regression on rows, as a function from rows to labels."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=100, max_iter=200).fit(rows, labels).predict
