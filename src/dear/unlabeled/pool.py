"""Whether unlabeled images help, which of them are foreign, and which become training images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dear.data.folds import assign_folds
from dear.errors import InputError
from dear.unlabeled.graph import centered_unit, nearest_neighbors
from dear.unlabeled.probe import UNLABELED, draw_rows, fit_semi_supervised_probe

NEIGHBORS = 5  #: labeled images that nearness counts
FOREIGN_QUANTILE = 0.1  #: of the labeled images are at least as far from the others as a foreign image
MAX_FOREIGN_SHARE = 0.8  #: share of foreign images from which on a pool is of another kind
FOLDS = 5
MAX_COMPARED = 5_000  #: unlabeled images that the cross-validation reads
DUPLICATE_COSINE = 0.97  #: cosine of centered features from which on two images count as duplicates
MIN_COMPARED = 20  #: held-out images below which only a clear loss can be measured
MIN_CONFIDENCE = 0.63  #: mean probability of the answers that a pool needs where a gain cannot be measured
MIN_SHARE = 0.5  #: smallest share of each predicted class that becomes training images


@dataclass(frozen=True)
class Nearness:
    """How near the unlabeled images are to the labeled ones."""

    values: Tensor  #: mean cosine with the nearest labeled images, [n]
    limit: float  #: below it an image is foreign
    foreign: Tensor  #: bool [n]; labeled images are never foreign

    @property
    def share(self) -> float:
        """Share of the values below the limit."""
        return float(self.foreign.double().mean()) if len(self.foreign) else 0.0


def measure_nearness(pool: Tensor, labeled: Tensor) -> Nearness:
    """How near unit features of a pool [n, E] are to those of labeled images [m, E].

    An image is foreign where it is farther from the labeled images than nearly all of these are from each
    other (`FOREIGN_QUANTILE`). One labeled image has no others; then nothing is foreign.

    >>> labeled = torch.nn.functional.normalize(torch.tensor([[1, 0.1, 0], [1, 0, 0.1]]), dim=1)
    >>> near = measure_nearness(torch.eye(3)[:2], labeled)
    >>> near.foreign.tolist()
    [False, True]
    """
    rows = torch.arange(len(labeled), device=labeled.device)
    values = nearest_neighbors(pool, labeled, NEIGHBORS)[0].mean(dim=1)
    if len(labeled) < 2:
        return Nearness(values, -1.0, torch.zeros(len(pool), dtype=torch.bool, device=pool.device))
    others = nearest_neighbors(labeled, labeled, NEIGHBORS, rows)[0].mean(dim=1)
    limit = float(others.double().quantile(FOREIGN_QUANTILE))
    return Nearness(values, limit, values < limit)


def duplicate_groups(features: Tensor, mean: Tensor | None = None, units: Tensor | None = None) -> Tensor:
    """A group number [n] per image: near duplicates, and duplicates of those, share one.

    Features find images of one scene; `units` [n] are equal for copies that were found by their pixels.

    >>> duplicate_groups(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.001]])).tolist()
    [0, 1, 0]
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    unit = centered_unit(features, features.mean(dim=0) if mean is None else mean)
    indices = torch.arange(len(unit), device=unit.device)
    cosines, rows = nearest_neighbors(unit, unit, NEIGHBORS, indices)
    near = cosines >= DUPLICATE_COSINE
    first, second = indices[:, None].expand_as(rows)[near], rows[near]
    if units is not None:
        order = units.to(indices).argsort(stable=True)
        same = units[order[1:]] == units[order[:-1]]
        first, second = torch.cat([first, order[1:][same]]), torch.cat([second, order[:-1][same]])
    pairs = (first.cpu().numpy(), second.cpu().numpy())
    graph = coo_array((np.ones(len(pairs[0])), pairs), shape=(len(unit), len(unit)))
    return torch.from_numpy(connected_components(graph, directed=False)[1]).long().to(features.device)


def labeled_groups(features: Tensor, labels: Tensor, units: Tensor | None = None) -> Tensor:
    """`duplicate_groups` [n] of the labeled images; -1 for the others."""
    labeled = labels != UNLABELED
    groups = torch.full_like(labels, -1)
    labeled_units = None if units is None else units[labeled]
    groups[labeled] = duplicate_groups(features[labeled], features.mean(dim=0), labeled_units)
    return groups


def label_folds(labels: Tensor, groups: Tensor, folds: int = FOLDS) -> Tensor:
    """The fold [n] in which each labeled image is held out; -1: never.

    Each class is dealt out evenly; images of one group are held out together. An image of the only group of
    its class is never held out: without it the class could not be learned. Unlabeled images are -1.

    >>> label_folds(torch.tensor([0, 0, 1, -1]), torch.arange(4), folds=2).sort().values.tolist()
    [-1, -1, 0, 1]
    """
    rows = (labels != UNLABELED).nonzero()[:, 0]
    keys = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    assigned = assign_folds(labels[rows].cpu().numpy(), folds, keys, groups[rows].cpu().numpy())
    fold = torch.full_like(labels, -1)
    fold[rows] = torch.from_numpy(assigned).to(labels)
    return fold


@dataclass(frozen=True)
class Comparison:
    """Held-out answers with and without the unlabeled images."""

    images: int  #: labeled images that were held out; 0: none could be
    labeled_only: int  #: answered correctly by the probe that saw labels alone
    with_pool: int  #: answered correctly by the probe that saw the unlabeled images as well
    gained: int  #: right only with the unlabeled images
    lost: int  #: right only without them

    @property
    def gain(self) -> float:
        """Difference of the accuracies; 0 where no image was held out."""
        return (self.gained - self.lost) / self.images if self.images else 0.0

    @property
    def error(self) -> float:
        """Standard error of `gain`, at least that of one answer that changed."""
        return math.sqrt(max(1, self.gained + self.lost)) / self.images if self.images else math.inf

    def to_dict(self) -> dict[str, float]:
        """Accuracies and the standard error of their difference, for JSON; empty where none was held out."""
        if not self.images:
            return {}
        return {
            "images": self.images,
            "labeled_only": round(self.labeled_only / self.images, 4),
            "with_unlabeled": round(self.with_pool / self.images, 4),
            "standard_error": round(self.error, 4),
        }

    @property
    def helps(self) -> bool:
        """Whether more images are answered rightly with the unlabeled images.

        >>> Comparison(40, 30, 30, 3, 3).helps, Comparison(40, 30, 31, 2, 1).helps
        (False, True)
        """
        return self.gain > 0


Reason = Literal["helps", "no gain", "unknown", "unsure"]


def compare_with_labeled_only(
    features: Tensor, labels: Tensor, texts: Tensor, groups: Tensor | None = None
) -> Comparison:
    """Cross-validate on the labeled images whether the unlabeled ones help.

    Fold by fold, labeled images are removed altogether: among the unlabeled images they would be answered
    better than new images are. Of a large pool a random part of `MAX_COMPARED` images is read.

    Args:
        features: unit features of all images [n, E].
        labels: int64 [n], -1 where there is none.
        texts: unit text features times CLIP's scale, [C, E].
        groups: near duplicates [n], held out together; None: `duplicate_groups` of the labeled images.
    """
    labeled = labels != UNLABELED
    fold = label_folds(labels, labeled_groups(features, labels) if groups is None else groups)
    pool = draw_rows((~labeled).nonzero()[:, 0], MAX_COMPARED)
    used = labeled.clone()
    used[pool] = True
    counts = torch.zeros(5, dtype=torch.int64)
    for number in fold[fold >= 0].unique().tolist():
        held_out = fold == number
        rows = used & ~held_out
        with_pool = fit_semi_supervised_probe(features[rows], labels[rows], texts).probe
        rows = labeled & ~held_out
        labeled_only = fit_semi_supervised_probe(features[rows], labels[rows], texts).probe
        before, after = (
            probe.logits(features[held_out]).argmax(dim=1) == labels[held_out]
            for probe in (labeled_only, with_pool)
        )
        parts = (before | ~before, before, after, after & ~before, before & ~after)
        counts += torch.stack([part.sum() for part in parts]).cpu()
    return Comparison(*counts.tolist())


def judge_pool(comparison: Comparison, confidence: float) -> Reason:
    """The result of a comparison on held-out labels for a pool.

    "helps": more labels are answered correctly with it; "no gain": not more. Of fewer than `MIN_COMPARED`
    labels only a loss of more than a standard error counts ("no gain"); otherwise the pool is used where the
    answers to it are certain ("unknown"), and not where they are not ("unsure").

    Args:
        comparison: of held-out answers.
        confidence: mean probability of the answers to the pool.

    Example:
        >>> judge_pool(Comparison(40, 30, 30, 3, 3), 0.9), judge_pool(Comparison(8, 6, 6, 0, 0), 0.9)
        ('no gain', 'unknown')
    """
    if comparison.images >= MIN_COMPARED:
        return "helps" if comparison.helps else "no gain"
    if comparison.gain < -comparison.error:
        return "no gain"
    return "unknown" if confidence >= MIN_CONFIDENCE else "unsure"


def mean_confidence(probabilities: Tensor, labels: Tensor) -> float:
    """Mean probability of the likeliest class [n, C] of images without a label [n]; 0 where all have one.

    >>> mean_confidence(torch.tensor([[1.0, 0.0], [0.25, 0.75]]), torch.tensor([0, UNLABELED]))
    0.75
    """
    pool = labels == UNLABELED
    return float(probabilities[pool].amax(dim=1).mean()) if bool(pool.any()) else 0.0


@dataclass(frozen=True)
class PseudoLabels:
    """Unlabeled images that become training images."""

    rows: Tensor  #: [k], ascending
    labels: Tensor  #: [k]
    confidences: Tensor  #: [k], probability of the label


def pseudo_label_share(comparison: Comparison, agreement: float) -> float:
    """Share of the unlabeled images to train on: those that are probably right, at least half.

    That is the accuracy on held-out labels, or the agreement of neighbors where few were held out.

    >>> pseudo_label_share(Comparison(50, 40, 45, 6, 1), 0.6)
    0.9
    """
    measured = comparison.images >= MIN_COMPARED
    accuracy = comparison.with_pool / comparison.images if measured else agreement
    return max(MIN_SHARE, accuracy)


def select_pseudo_labels(probabilities: Tensor, candidates: Tensor, share: float = MIN_SHARE) -> PseudoLabels:
    """The more confident share per predicted class, at least one image of each class that is predicted.

    Args:
        probabilities: of the classes [n, C] (`SemiSupervisedFit.probabilities`).
        candidates: bool [n]: unlabeled and not foreign.
        share: of the images of each predicted class, rounded up.

    Example:
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
        >>> chosen = select_pseudo_labels(probabilities, torch.ones(3) > 0)
        >>> chosen.rows.tolist(), chosen.labels.tolist()
        ([0, 2], [0, 1])
    """
    if not 0 < share <= 1:
        raise InputError(f"share must be above 0 and at most 1, got {share}")
    confidence, predicted = probabilities.max(dim=1)
    rows = []
    for label in predicted[candidates].unique().tolist():
        members = (candidates & (predicted == label)).nonzero()[:, 0]
        order = confidence[members].argsort(descending=True, stable=True)
        rows.append(members[order[: math.ceil(share * len(members))]])
    chosen = torch.cat(rows).sort().values if rows else candidates.nonzero()[:0, 0]
    return PseudoLabels(chosen, predicted[chosen], confidence[chosen])
