"""How ways of removing something are compared: by a classifier on held-out training images.

Each way is applied to features of the training images, a linear classifier is trained on all folds but one,
and predicts the images of that fold, unchanged and with the property or concept changed. The simplest way
whose result is close to the best is chosen. `concept_trials` does so for concepts, `edit_trials`
for properties of images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.nn.functional as F

from dear.heads.collect import HeadContributions
from dear.shortcuts.removal import Removal

FOLDS = 4
Labels = np.ndarray[Any, np.dtype[np.int64]]
Features = np.ndarray[Any, np.dtype[np.float32]]


def choose_simplest(costs: Mapping[str, float], margin: float) -> str:
    """The first candidate, in order of simplicity, whose cost is within `margin` of the lowest.

    >>> choose_simplest({"words": 0.12, "heads": 0.1, "copies": 0.3}, 0.03)
    'words'
    """
    return next(name for name in costs if costs[name] <= min(costs.values()) + margin)


def unit_features(removal: Removal | None, images: HeadContributions) -> Features:
    """Unit features [n, E] after the removal `removal`, if any."""
    features = images.features if removal is None else removal.apply(images)
    rows: Features = F.normalize(features, dim=-1).numpy()
    return rows


def fit_classifier(rows: Features, labels: Labels) -> Any:
    """The `predict` function of a logistic regression on rows [n, E]."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=100, max_iter=200).fit(rows, labels).predict
