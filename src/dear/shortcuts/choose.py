"""Chooses the best way to remove a concept from the training images alone.

Each way names a part of the feature that carries the concept. Exchange that part between images of different
classes, and a classifier that was trained with the concept removed should still answer right, whichever way
named the part. So every way is scored by cross-validation on the training images as they are and with the
part exchanged that each way names; no group label is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from dear.data.folds import Places, feature_folds
from dear.errors import UsageError
from dear.heads.ablate import Collected
from dear.shortcuts.removal import Repair, combine
from dear.shortcuts.trials import FOLDS, classifier, simplest, unit_features

ORDER = ("words", "examples", "leace", "heads")
"""Ways from the simplest to use (it folds into weights) on; scores within `CLOSE` count as equal.

For methods that learn inside the image tower, heads come first where they alone do as well: such a method can
learn to write what was taken from the last feature elsewhere in it, but cannot read what heads no longer add.
"""

CLOSE = 0.03
ENOUGH = 0.01  #: how near to the best heads alone must be to come first
COSTLY = 0.05  #: of cross-validated accuracy on the training images


@dataclass(frozen=True)
class Choice:
    """The way that was chosen, and the score of every way (share of right answers, 0 to 1)."""

    way: str  #: its name
    repair: Repair  #: the removal
    scores: Mapping[str, float]  #: of every way, over the images as they are and with parts exchanged
    #: cross-validated accuracy on the training images with nothing removed; None: not measured
    before: float | None = None
    after: float | None = None  #: the same with the removal

    @property
    def costly(self) -> bool:
        """Whether the removal takes away what the classes differ in."""
        return self.before is not None and self.after is not None and self.before - self.after > COSTLY


def exchange(images: Collected, repair: Repair, partner: Tensor) -> Collected:
    """Images as if the part of the feature that `repair` removes came from image `partner[i]`."""
    kept = repair.apply(images)
    outputs = images.outputs
    if repair.heads:
        outputs = outputs.clone()
        for layer, head in repair.heads:
            place = images.layers.index(layer)
            outputs[:, place, head] = images.outputs[partner, place, head]
    return Collected(kept + (images.features - kept)[partner], outputs, images.maps, images.layers)


def choose(
    images: Collected,
    labels: Tensor,
    ways: Mapping[str, Repair],
    seed: int = 1,
    heads_first: bool = False,
    units: Places | None = None,
) -> Choice:
    """The best of some ways ("words", "heads", "examples", "leace") to remove one concept, alone or in pairs.

    Args:
        images: the training images.
        labels: [n].
        ways: the removal by each way.
        seed: of the exchanges.
        heads_first: prefer heads where they alone are as good as the best, for a method that learns inside
            the image tower.
        units: [n], the same for copies of an image; None: images with equal features are copies.
    """
    if not ways:
        raise UsageError("choosing how to remove a concept needs at least one way, got none")
    names = sorted(ways, key=ORDER.index)
    if len(names) == 1:
        return Choice(names[0], ways[names[0]], {})
    candidates = {name: ways[name] for name in names}
    for first, second in combinations(names, 2):
        if {first, second} != {"examples", "leace"}:
            candidates[f"{first}+{second}"] = combine(ways[first], ways[second])
    partner = _partners(labels, seed)
    views = [images, *(exchange(images, ways[name], partner) for name in names)]
    fold = feature_folds(images.features, labels, FOLDS, units).numpy()
    scores = {
        name: float(np.mean(_accuracies(repair, images, views, labels, fold)))
        for name, repair in candidates.items()
    }
    chosen = simplest({name: -score for name, score in scores.items()}, CLOSE)
    if heads_first and scores.get("heads", 0.0) >= max(scores.values()) - ENOUGH:
        chosen = "heads"
    nothing = Repair((), (), images.features.mean(dim=0), torch.zeros_like(candidates[chosen].removed))
    before, after = (
        _accuracies(one, images, [images], labels, fold)[0] for one in (nothing, candidates[chosen])
    )
    return Choice(chosen, candidates[chosen], scores, before, after)


def _partners(labels: Tensor, seed: int) -> Tensor:
    """For every image one of another class."""
    rng, classes = np.random.default_rng(seed), labels.numpy()
    return torch.tensor([int(rng.choice(np.flatnonzero(classes != label))) for label in classes])


def _accuracies(
    repair: Repair, images: Collected, views: Sequence[Collected], labels: Tensor, fold: Places
) -> list[float]:
    """Cross-validated accuracy of a linear classifier on repaired features, tested on each of some views."""
    learn, *tests = (unit_features(repair, part) for part in (images, *views))  # [n, E] each
    truth = labels.numpy()
    right = np.zeros(len(tests))
    for number in range(FOLDS):
        held = fold == number
        if not held.any() or len(np.unique(truth[~held])) < 2:
            continue
        answer = classifier(learn[~held], truth[~held])
        right += [int((answer(test[held]) == truth[held]).sum()) for test in tests]
    return [float(count) / max(1, int((fold >= 0).sum())) for count in right]
