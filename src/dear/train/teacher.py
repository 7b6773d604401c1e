"""Pseudo-labels for trainings on parts of the labeled images.

A cross-validation must not learn the labels that it holds out, and pseudo-labels that were computed with them
carry them along. `Teacher` therefore computes the pseudo-labels anew from the labels of each part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dear.data.images import ImageSet
from dear.shortcuts.edited_images import JoinedImages
from dear.train.setup.balance import balanced_rows
from dear.unlabeled import UNLABELED, fit_semi_supervised_probe


@dataclass(frozen=True, eq=False)
class Teacher:
    """Labels the same unlabeled images from any part of the labels.

    The n labeled images come first in `features`, then m unlabeled ones, of which p are trained on.
    """

    features: Tensor  #: unit image features [n + m, E], on the CPU
    texts: Tensor  #: unit text features times CLIP's scale, [C, E]
    answers: Tensor  #: classes [m] of the unlabeled images by all labels
    chosen: Tensor  #: places [p] of the images to train on among the m
    images: ImageSet  #: those p images, labeled by all labels
    weight: float = 1.0  #: of an unlabeled image, relative to a labeled one

    def label(self, labels: Tensor) -> Tensor:
        """Classes [p] of the images to train on by some of the labels; -1: not used.

        Where a class has no label, unlabeled images of that class, by all labels, are not used.

        Args:
            labels: of the n labeled images; -1 where the label is held out.
        """
        count = len(labels)
        present = labels[labels != UNLABELED].unique()  # ascending
        column = torch.full((len(self.texts),), UNLABELED, dtype=torch.int64)
        column[present] = torch.arange(len(present))
        usable = column[self.answers] != UNLABELED  # [m]
        rows = torch.cat([(labels != UNLABELED).nonzero()[:, 0], count + usable.nonzero()[:, 0]])
        known = torch.full((count + len(self.answers),), UNLABELED, dtype=torch.int64)
        known[:count] = torch.where(labels == UNLABELED, UNLABELED, column[labels])
        fit = fit_semi_supervised_probe(self.features[rows], known[rows], self.texts[present])
        answers = torch.full_like(known, UNLABELED)
        answers[rows] = present[fit.probabilities.argmax(dim=1)]
        return answers[count + self.chosen]

    def extend(self, labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Places and labels to train on: the labeled images at `rows` and what their labels teach.

        Args:
            labels: of all n labeled images.
            rows: places of those whose labels may be read.

        Returns:
            Places [k] in the labeled images followed by the p unlabeled ones, and their labels [k].
        """
        held = torch.full_like(labels, UNLABELED)
        held[rows] = labels[rows]
        pseudo = self.label(held)
        used = (pseudo != UNLABELED).nonzero()[:, 0]
        return torch.cat([rows, len(labels) + used]), torch.cat([labels[rows], pseudo[used]])

    def join(self, images: ImageSet, rows: Tensor, labels: Tensor) -> JoinedImages:
        """The labeled images followed by the p unlabeled ones, with the labels [k] at the places `rows`."""
        joined = JoinedImages.of(images, self.images)
        changed = joined.labels.clone()
        changed[rows] = labels
        return replace(joined, labels=changed)


def repeat_labeled(labels: Tensor, labeled: int, weight: float, balance: bool) -> list[int]:
    """Indices of the images of an epoch; labeled ones are repeated if unlabeled ones weigh less.

    Args:
        labels: of the labeled images, then of the unlabeled ones, [n].
        labeled: number of labeled images.
        weight: of an unlabeled image relative to a labeled one, above 0 and at most 1.
        balance: repeat images of rare classes.

    Example:
        >>> repeat_labeled(torch.tensor([0, 1, 0, 1]), labeled=2, weight=0.5, balance=False)
        [0, 1, 0, 1, 2, 3]
    """
    times = max(1, round(1 / weight))
    places = [*list(range(labeled)) * times, *range(labeled, len(labels))]
    if not balance:
        return places
    return [places[row] for row in balanced_rows(labels[torch.tensor(places, dtype=torch.int64)])]
