"""Published ways to learn from unlabeled features, for comparison: TransCLIP, StatA, and scikit-learn's.

TransCLIP (Zanella et al., NeurIPS 2024) and StatA (Zanella et al., CVPR 2025) are written from the papers,
with fixed settings: the authors of TransCLIP tune gamma on validation images.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Answers = Callable[[Tensor], Tensor]  #: unit features [n, E] -> scores [n, C]


def transclip(
    labeled: Tensor, labels: Tensor, pool: Tensor, texts: Tensor, scale: float, text_weight: float = 0.5
) -> Answers:
    """Gaussians with one diagonal covariance, fitted to the pool with the labels as fixed assignments."""
    gamma, classes, width = 0.02, len(texts), pool.shape[1]
    truth = F.one_hot(labels, classes).to(pool)
    zero_shot = (scale * pool @ texts.T).softmax(dim=1)
    affinity = _affinity(torch.cat([labeled, pool]))[len(labeled) :]
    centers = F.normalize(truth.T @ labeled / truth.sum(dim=0)[:, None].clamp(min=1), dim=1)
    variance = torch.full((width,), 1 / width).to(pool)
    assigned = zero_shot
    share_labeled, share_pool = gamma / len(labeled), 1 / len(pool)
    for _ in range(10):
        logs = _log_density(pool, centers, variance)
        for _ in range(5):
            neighbors = affinity @ torch.cat([truth, assigned])
            assigned = (text_weight * zero_shot.clamp(min=1e-30).log() + logs + neighbors).softmax(dim=1)
        total = share_labeled * truth.sum(dim=0) + share_pool * assigned.sum(dim=0)
        sums = share_labeled * truth.T @ labeled + share_pool * assigned.T @ pool
        centers = F.normalize(sums / total[:, None].clamp(min=1e-12), dim=1)
        spread = share_labeled * _spread(truth, labeled, centers) + share_pool * _spread(
            assigned, pool, centers
        )
        variance = (spread / (gamma + 1)).clamp(min=1e-8)
    return lambda features: (
        text_weight * (scale * features @ texts.T).log_softmax(dim=1)
        + _log_density(features, centers, variance)
    )


def stata(labeled: Tensor, labels: Tensor, pool: Tensor, texts: Tensor, scale: float) -> Answers:
    """Gaussians whose means and covariance are anchored at the statistics of the texts."""
    anchor, count = 1.0, len(labeled)
    features = torch.cat([labeled, pool])
    truth = F.one_hot(labels, len(texts)).to(pool)
    start = (scale * features @ texts.T).softmax(dim=1)
    start[:count] = truth
    affinity, assigned = _affinity(features), start
    centers, variance = texts, _spread(start, features, texts) / len(features)
    first = variance
    for _ in range(10):
        logs = _log_density(features, centers, variance)
        for _ in range(5):
            assigned = (start.clamp(min=1e-30).log() + logs + affinity @ assigned).softmax(dim=1)
            assigned[:count] = truth
        sizes = assigned.sum(dim=0)
        share = (sizes / (sizes + anchor))[:, None]
        means = assigned.T @ features / sizes[:, None].clamp(min=1e-12)
        centers = share * means + (1 - share) * texts
        anchored = (anchor * (first + (centers - texts) ** 2)).sum(dim=0)
        total = sizes.sum() + anchor * len(texts)
        variance = ((_spread(assigned, features, centers) + anchored) / total).clamp(min=1e-8)
    return lambda features: (
        (scale * features @ texts.T).log_softmax(dim=1) + _log_density(features, centers, variance)
    )


def scikit_learn(kind: str, labeled: Tensor, labels: Tensor, pool: Tensor) -> Answers:
    """`SelfTrainingClassifier`, `LabelSpreading`, or `LogisticRegression` of the labels alone."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier

    mean = torch.cat([labeled, pool]).mean(dim=0)

    def inputs(features: Tensor) -> np.ndarray:
        return np.asarray(F.normalize(features - mean, dim=1))

    features = np.concatenate([inputs(labeled), inputs(pool)])
    known = np.concatenate([labels.numpy(), np.full(len(pool), -1)])
    if kind == "LogisticRegression":
        model = LogisticRegression(max_iter=200)
        features, known = features[: len(labeled)], labels.numpy()
    elif kind == "LabelSpreading":
        model = LabelSpreading(kernel="knn", n_neighbors=7, max_iter=100)
    else:
        best = max(10, len(pool) // 5)
        model = SelfTrainingClassifier(
            LogisticRegression(max_iter=100), criterion="k_best", k_best=best, max_iter=5
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(features, known)

    def answers(features: Tensor) -> Tensor:
        scores = torch.zeros(len(features), int(known.max()) + 1)
        scores[:, torch.from_numpy(model.classes_)] = torch.from_numpy(
            model.predict_proba(inputs(features))
        ).float()
        return scores

    return answers


def _affinity(features: Tensor, neighbors: int = 3) -> Tensor:
    cosines = features @ features.T
    cosines.fill_diagonal_(-2)
    nearest = cosines.topk(neighbors, dim=1)
    joined = torch.zeros_like(cosines).scatter_(1, nearest.indices, nearest.values.clamp(min=0))
    return torch.maximum(joined, joined.T)


def _log_density(features: Tensor, centers: Tensor, variance: Tensor) -> Tensor:
    lengths = (features**2 / variance).sum(dim=1, keepdim=True)
    return -0.5 * (lengths - 2 * (features / variance) @ centers.T + (centers**2 / variance).sum(dim=1))


def _spread(weights: Tensor, features: Tensor, centers: Tensor) -> Tensor:
    squares = (weights.sum(dim=1)[:, None] * features**2).sum(dim=0)
    mixed = ((weights @ centers) * features).sum(dim=0)
    return squares - 2 * mixed + (weights.sum(dim=0)[:, None] * centers**2).sum(dim=0)
