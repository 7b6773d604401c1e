"""Which images to label next: centers of clusters first, then also images that the probe is unsure of.

Every prefix of the returned order is itself a good choice: clusters are computed at sizes that double, and
each size adds the most central image of the largest clusters that have no chosen or labeled image yet
(after TypiClust, Hacohen et al., ICML 2022).
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dear.errors import InputError
from dear.unlabeled.graph import nearest_neighbors, text_span
from dear.unlabeled.pool import DUPLICATE_COSINE
from dear.unlabeled.probe import UNLABELED, fit_semi_supervised_probe

FIRST_CLUSTERS = 8  #: clusters of the smallest size, where the number of classes is not known
TYPICAL_NEIGHBORS = 20  #: whose mean cosine is how typical an image is
_MAX_CLUSTERED = 20_000  # images that k-means reads; centers are then assigned to all


def typicality(unit_features: Tensor) -> Tensor:
    """Mean cosine [n] of each image with its nearest neighbors, of centered unit features [n, E]."""
    rows = torch.arange(len(unit_features), device=unit_features.device)
    cosines = nearest_neighbors(unit_features, unit_features, TYPICAL_NEIGHBORS, rows)[0]
    return cosines.mean(dim=1) if cosines.shape[1] else unit_features.new_zeros(len(unit_features))


def choose_typical(
    unit_features: Tensor,
    count: int,
    *,
    labeled: Tensor | None = None,
    classes: int = FIRST_CLUSTERS,
    scores: Tensor | None = None,
    exclude: Tensor | None = None,
    appearance: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Rows of the images to label, the most useful first, at most `count`, without near duplicates.

    Args:
        unit_features: centered unit features of all images [n, E].
        count: images to choose; fewer are returned where the others are labeled, excluded or duplicates.
        labeled: bool [n]: images that have a label already, which cover their clusters; None: none.
        classes: clusters of the first size; the next sizes are twice, four times, … as many.
        scores: how useful each image is within its cluster [n]; None: its cosine with the cluster's center.
        exclude: bool [n]: images that are never chosen (foreign, skipped); None: none.
        appearance: centered unit features [n, E'] by which duplicates are found; None: `unit_features`. In a
            space of few dimensions different images agree closely.
        seed: of k-means.

    Raises:
        InputError: count is below 1.

    Example:
        >>> two_groups = F.normalize(torch.tensor([[1, 0.4], [1, 0], [1, -0.4], [0.0, 1]]), dim=1)
        >>> choose_typical(two_groups, 2, classes=2, scores=torch.tensor([0.1, 0.9, 0.2, 0.5])).tolist()
        [1, 3]
    """
    if count < 1:
        raise InputError(f"count must be at least 1, got {count}")
    images, device = len(unit_features), unit_features.device
    is_covered = torch.zeros(images, dtype=torch.bool, device=device) if labeled is None else labeled.clone()
    excluded = is_covered.clone() if exclude is None else is_covered | exclude
    appearances = unit_features if appearance is None else appearance
    chosen: list[int] = []
    size = max(1, classes)
    while size < 2 * int(is_covered.sum()) and labeled is not None:
        size *= 2
    for row in is_covered.nonzero()[:, 0].tolist():
        excluded |= appearances @ appearances[row] >= DUPLICATE_COSINE
    while len(chosen) < count and not bool(excluded.all()):
        size = min(size, images)
        clusters = cluster_images(unit_features, size, seed)
        values = center_cosines(unit_features, clusters) if scores is None else scores
        covered_clusters = set(clusters[is_covered].tolist())
        sizes = torch.bincount(clusters, minlength=size)
        for cluster in sizes.argsort(descending=True, stable=True).tolist():
            rows = ((clusters == cluster) & ~excluded).nonzero()[:, 0]
            if cluster in covered_clusters or not len(rows) or len(chosen) == count:
                continue
            row = int(rows[values[rows].argmax()])
            chosen.append(row)
            is_covered[row] = True
            excluded |= appearances @ appearances[row] >= DUPLICATE_COSINE
            excluded[row] = True
        if size == images:
            break
        size *= 2
    return torch.tensor(chosen, dtype=torch.int64, device=device)


def choose_next(
    features: Tensor,
    count: int,
    *,
    labels: Tensor | None = None,
    texts: Tensor | None = None,
    exclude: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Rows of the images to label next, the most useful first.

    Without labels these are centers of clusters, in the span of the texts where three classes or more have
    names: in the whole feature, images cluster by whatever differs most. On the line between the texts of two
    classes, images of unit length have two places and form no clusters. With labels, the clusters that have
    no label are visited, in the space where neighbors agree with the probe, and in each the image with the
    largest product of uncertainty (1 - margin) and typicality is chosen.

    Args:
        features: unit features of all images [n, E].
        count: images to choose; fewer are returned where the others are labeled, excluded or duplicates.
        labels: int64 [n], -1 where there is none; None: none is labeled.
        texts: unit text features times CLIP's scale, [C, E]; needed with labels.
        exclude: bool [n]: images that are never chosen (foreign, skipped).
        seed: of k-means.

    Raises:
        InputError: count is below 1, or there are labels and no texts.
    """
    centered = features - features.mean(dim=0)
    unit = appearance = F.normalize(centered, dim=1)
    classes = FIRST_CLUSTERS if texts is None else len(texts)
    basis = features[:0] if texts is None else text_span(texts)
    if labels is None or not bool((labels != UNLABELED).any()):
        if len(basis) > 1:
            unit = F.normalize(centered @ basis.T, dim=1)
        return choose_typical(unit, count, classes=classes, exclude=exclude, appearance=appearance, seed=seed)
    if texts is None:
        raise InputError("choose_next needs texts [C, E] where images are labeled, got None")
    fit = fit_semi_supervised_probe(features, labels, texts)
    if fit.space == "text" and len(basis) > 1:
        unit = F.normalize(centered @ basis.T, dim=1)
    typical = typicality(unit)
    uncertainty = 1 - margins(fit.probe.logits(features).softmax(dim=1))
    return choose_typical(
        unit,
        count,
        labeled=labels != UNLABELED,
        classes=classes,
        scores=uncertainty * (typical - typical.min()),
        exclude=exclude,
        appearance=appearance,
        seed=seed,
    )


def cluster_images(unit_features: Tensor, clusters: int, seed: int = 0) -> Tensor:
    """The k-means cluster [n] of each image; of more than 20,000, k-means reads a random part."""
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    points: NDArray[np.float32] = unit_features.cpu().numpy()
    clusters = min(clusters, len(points))
    if len(points) > _MAX_CLUSTERED:
        model = MiniBatchKMeans(clusters, n_init=1, batch_size=4096, random_state=seed)
        part = np.random.default_rng(seed).permutation(len(points))[: max(_MAX_CLUSTERED, clusters)]
        centers = model.fit(points[part]).cluster_centers_
    else:
        with warnings.catch_warnings():  # copies of an image may leave fewer distinct points than clusters
            warnings.simplefilter("ignore", ConvergenceWarning)
            centers = KMeans(clusters, n_init=1, random_state=seed).fit(points).cluster_centers_
    nearest = torch.from_numpy(centers).to(unit_features)
    # |x - c|^2 = |x|^2 - 2 x c + |c|^2, where |x|^2 is the same for all centers
    return torch.cat(
        [
            (nearest.square().sum(dim=1) - 2 * part @ nearest.T).argmin(dim=1)
            for part in unit_features.split(8192)
        ]
    )


def center_cosines(unit_features: Tensor, clusters: Tensor) -> Tensor:
    """Cosine [n] of each image with the mean of its cluster [n].

    >>> unit_features = F.normalize(torch.tensor([[1.0, 1], [1, 0], [1, -1]]), dim=1)
    >>> center_cosines(unit_features, torch.zeros(3).long())[1]
    tensor(1.)
    """
    centers = unit_features.new_zeros(int(clusters.max()) + 1, unit_features.shape[1])
    centers.index_add_(0, clusters, unit_features)
    return (unit_features * F.normalize(centers, dim=1)[clusters]).sum(dim=1)


def margins(probabilities: Tensor) -> Tensor:
    """The probability of the best class minus that of the second, [n]; 1 for a single class.

    >>> margins(torch.tensor([[0.75, 0.25], [0.5, 0.5]])).tolist()
    [0.5, 0.0]
    """
    if probabilities.shape[1] < 2:
        return probabilities.new_ones(len(probabilities))
    best = probabilities.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]
