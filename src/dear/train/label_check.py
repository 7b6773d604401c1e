"""Labels that look wrong: images whose own class is far less probable than another, by cross-validation.

A logistic regression on frozen image features is trained on all folds but one and answers the images of that
fold, so no image is judged by a classifier that saw its label. An image is suspected where another class is
`FACTOR` times as probable as its own; suspects are sorted by the probability of their own label, which ranks
wrong labels better than that ratio does and is cleanlab's self-confidence (`research/wrong_labels.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dear.data.folds import Places, feature_folds
from dear.data.images import ImageSet

FACTOR = 20.0  #: how many times more probable another class must be
FOLDS = 5
NAMED = 3  #: suspects that a notice names
LEAST_IMAGES = 30  #: fewer say nothing about labels without being asked
MOST_WORK = 1_000_000  #: images times classes up to which labels are looked at without being asked (seconds)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Suspect:
    """An image whose label looks wrong."""

    index: int  #: in the image set
    key: str
    label: str
    suggestion: str
    confidence: float  #: probability of the suggestion, out of sample
    own: float  #: probability of the label, out of sample

    @property
    def factor(self) -> float:
        """How many times more probable the suggestion is."""
        return self.confidence / max(self.own, 1e-12)


def out_of_sample(
    features: Tensor, labels: Tensor, classes: int, seed: int = 1, units: Places | None = None
) -> Floats:
    """Probabilities [n, C] by classifiers that did not see the image, from features [n, E] and labels [n].

    An image that is the only one of its class, but for copies, cannot be judged: its own class has
    probability 1. `units` [n]: copies of an image have the same; None: images with equal features are copies.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    unit = torch.nn.functional.normalize(features.double(), dim=1)
    x = torch.nn.functional.normalize(unit - unit.mean(dim=0), dim=1).numpy()
    y = labels.numpy()
    found = np.zeros((len(y), classes))
    found[np.arange(len(y)), y] = 1.0
    fold = feature_folds(features, labels, FOLDS, units, seed).numpy()
    several = np.flatnonzero(fold >= 0)
    if len(np.unique(y[several])) < 2:
        return found
    for number in np.unique(fold[several]):
        known, held = several[fold[several] != number], several[fold[several] == number]
        with warnings.catch_warnings():  # the last digits of a probability do not matter here
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LogisticRegression(C=1.0, max_iter=200).fit(x[known], y[known])
        rows = np.zeros((len(held), classes))
        rows[:, model.classes_] = model.predict_proba(x[held])
        found[held] = rows
    found[several] = _calibrated(found[several], y[several])
    return found


def _calibrated(probabilities: Floats, labels: npt.NDArray[np.int64]) -> Floats:
    """The probabilities at the temperature that makes the labels most probable."""
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    logits = np.log(np.maximum(probabilities, 1e-12))
    rows = np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        return -float(log_softmax(logits / np.exp(log_temperature), axis=1)[rows, labels].mean())

    best = minimize_scalar(loss, bounds=(-4.0, 4.0), method="bounded")
    scaled: Floats = np.exp(log_softmax(logits / np.exp(best.x), axis=1))
    return scaled


def rank_labels(probabilities: Floats, labels: Tensor) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Places of the labels that look wrong, the least probable first, and the best other class [n]."""
    y = labels.numpy()
    rows = np.arange(len(y))
    others = probabilities.copy()
    own = others[rows, y]
    others[rows, y] = -1.0
    best = others.argmax(axis=1)
    suspected = others[rows, best] >= FACTOR * own
    return [index for index in np.argsort(own, kind="stable").tolist() if suspected[index]], best


def suspects_of(
    images: ImageSet, features: Tensor, seed: int = 1, units: Places | None = None
) -> tuple[Suspect, ...]:
    """Images whose labels look wrong, the most suspicious first, from frozen features [n, E].

    `units` [n]: copies of an image have the same; None: images with equal features are copies.
    """
    given = images.labels.cpu()
    probabilities = out_of_sample(features.cpu(), given, len(images.classes), seed, units)
    places, best = rank_labels(probabilities, given)
    names = given.tolist()
    return tuple(
        Suspect(
            index,
            images.key(index),
            images.classes[names[index]],
            images.classes[best[index]],
            float(probabilities[index, best[index]]),
            float(probabilities[index, names[index]]),
        )
        for index in places
    )


def looked_at(images: ImageSet, features: Tensor, units: Places | None = None) -> dict[str, Any] | None:
    """What `metrics.json` of a run says of its training labels; None: too few images, or too much work."""
    if not LEAST_IMAGES <= len(images) <= MOST_WORK / len(images.classes):
        return None
    found = suspects_of(images, features, units=units)
    first = [
        {"image": each.key, "label": each.label, "suggestion": each.suggestion} for each in found[:NAMED]
    ]
    return {"images": len(images), "look_wrong": len(found), "first": first}


def label_sentence(labels: Mapping[str, Any] | None) -> str:
    """The same in words; "" where no label looks wrong.

    >>> first = {"image": "a.jpg", "label": "cat", "suggestion": "dog"}
    >>> label_sentence({"images": 90, "look_wrong": 1, "first": [first]})
    "1 of 90 training labels looks wrong ('a.jpg': cat, or dog?); dear data check shows it"
    """
    if not labels or not labels["look_wrong"]:
        return ""
    count, one = labels["look_wrong"], labels["look_wrong"] == 1
    named = "; ".join(
        f"{each['image']!r}: {each['label']}, or {each['suggestion']}?" for each in labels["first"]
    )
    rest = count - len(labels["first"])
    named += f"; and {rest} more" if rest > 0 else ""
    return (
        f"{count} of {labels['images']} training labels look{'s' if one else ''} wrong ({named}); "
        f"dear data check shows {'it' if one else 'them'}"
    )
