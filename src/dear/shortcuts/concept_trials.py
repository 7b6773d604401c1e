"""Chooses how to remove a concept: by words, heads, examples, or two of them.

Each way removes a part of the feature that carries the concept. If that part is exchanged between images of
different classes, a classifier trained with the concept removed should still be correct. Every way is
therefore scored by cross-validated accuracy on the training images, unchanged and with the part that each way
removes exchanged. No group labels are used. `edit_trials` chooses for properties of images, which can be
edited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from dear.data.folds import IntArray, feature_folds
from dear.errors import UsageError
from dear.heads.collect import HeadContributions
from dear.shortcuts.removal import Removal, combine
from dear.shortcuts.trials import FOLDS, choose_simplest, fit_classifier, unit_features

ORDER = ("words", "examples", "leace", "heads")
"""Ways to remove a concept, the simplest to use first (it folds into weights).

For methods that learn inside the image tower, heads are preferred if they alone score as well: such a method
can learn to restore a direction that was removed from the final feature, but not the output of removed heads.
"""

CLOSE = 0.03  #: scores that differ by less are equal, and the simplest way is chosen
HEADS_MARGIN = 0.01  #: largest difference from the best score at which heads are preferred
MAX_ACCURACY_LOSS = 0.05  #: loss of cross-validated training accuracy above which a removal is costly


@dataclass(frozen=True)
class ConceptChoice:
    """The chosen way to remove a concept, and the scores of all ways."""

    way: str
    removal: Removal
    scores: Mapping[
        str, float
    ]  #: mean accuracy (0 to 1) of every way over unchanged and exchanged images; empty: not compared
    before: float | None = None  #: cross-validated training accuracy without a removal; None: not measured
    after: float | None = None  #: cross-validated training accuracy with the removal

    @property
    def costly(self) -> bool:
        """Whether the removal costs accuracy, because the classes differ in what it removes."""
        if self.before is None or self.after is None:
            return False
        return self.before - self.after > MAX_ACCURACY_LOSS


def exchange(images: HeadContributions, removal: Removal, partner: Tensor) -> HeadContributions:
    """Images whose part of the feature that `removal` removes is replaced by that of image `partner[i]`."""
    remaining = removal.apply(images)  # [n, E]
    outputs = images.outputs
    if removal.heads:
        outputs = outputs.clone()
        for layer, head in removal.heads:
            row = images.layers.index(layer)
            outputs[:, row, head] = images.outputs[partner, row, head]
    features = remaining + (images.features - remaining)[partner]
    return HeadContributions(features, outputs, images.maps, images.layers)


def choose_concept_removal(
    images: HeadContributions,
    labels: Tensor,
    ways: Mapping[str, Removal],
    heads_first: bool = False,
    units: IntArray | None = None,
) -> ConceptChoice:
    """The best of several ways ("words", "heads", "examples", "leace") to remove a concept, or pair of ways.

    Args:
        images: the training images.
        labels: [n].
        ways: the removal of each way.
        heads_first: prefer heads if they alone score as well as the best, for a method that learns inside
            the image tower.
        units: [n], equal for copies of an image; None: images with equal features are copies.
    """
    if not ways:
        raise UsageError("ways must contain at least one removal to choose from, got none")
    names = sorted(ways, key=ORDER.index)
    if len(names) == 1:
        return ConceptChoice(names[0], ways[names[0]], {})
    candidates = {name: ways[name] for name in names}
    for first, second in combinations(names, 2):
        if {first, second} != {"examples", "leace"}:
            candidates[f"{first}+{second}"] = combine(ways[first], ways[second])
    fold = feature_folds(images.features, labels, FOLDS, units).numpy()
    if not (fold >= 0).any() or len(labels.unique()) < 2:  # one image per class, or one class
        way = "heads" if heads_first and "heads" in names else names[0]
        return ConceptChoice(way, ways[way], {})
    partner = _partners(labels)
    views = [images, *(exchange(images, ways[name], partner) for name in names)]
    scores = {
        name: float(np.mean(_accuracies(removal, images, views, labels, fold)))
        for name, removal in candidates.items()
    }
    chosen = choose_simplest({name: -score for name, score in scores.items()}, CLOSE)
    if heads_first and "heads" in scores and scores["heads"] >= max(scores.values()) - HEADS_MARGIN:
        chosen = "heads"
    no_removal = Removal((), (), images.features.mean(dim=0), torch.zeros_like(candidates[chosen].removed))
    before, after = (
        _accuracies(removal, images, [images], labels, fold)[0]
        for removal in (no_removal, candidates[chosen])
    )
    return ConceptChoice(chosen, candidates[chosen], scores, before, after)


def _partners(labels: Tensor) -> Tensor:
    """For every image the index of a random image of another class, [n]."""
    rng, classes = np.random.default_rng(1), labels.numpy()
    return torch.tensor([int(rng.choice(np.flatnonzero(classes != label))) for label in classes])


def _accuracies(
    removal: Removal,
    images: HeadContributions,
    views: Sequence[HeadContributions],
    labels: Tensor,
    fold: IntArray,
) -> list[float]:
    """Cross-validated accuracy of a linear classifier on remaining features, tested on each of `views`."""
    train_rows, *test_rows = (unit_features(removal, view) for view in (images, *views))  # [n, E] each
    truth = labels.numpy()
    correct = np.zeros(len(test_rows))
    for number in range(FOLDS):
        test = fold == number
        if not test.any() or len(np.unique(truth[~test])) < 2:
            continue
        predict = fit_classifier(train_rows[~test], truth[~test])
        correct += [int((predict(rows[test]) == truth[test]).sum()) for rows in test_rows]
    return [float(count) / max(1, int((fold >= 0).sum())) for count in correct]
