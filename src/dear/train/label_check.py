"""Labels that look wrong: images whose label is far less probable than another class, by cross-validation.

A logistic regression on frozen image features is trained on all folds but one and answers the images of that
fold, so no image is judged by a classifier that saw its label. An image is suspect if another class is
`FACTOR` times as probable as its own; suspects are sorted by the probability of their own label, which ranks
wrong labels better than that ratio does and is cleanlab's self-confidence (`research/data/wrong_labels.py`).

Of several labels per image each is judged by itself, against its absence: a label that an image has looks
wrong, or one that it does not have looks missing, where the opposite is `FACTOR` times as probable.
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

from dear.calibration.several_labels import fit_sigmoids
from dear.data.folds import IntArray, feature_folds
from dear.data.images import ImageSet, main_labels, targets_of

FACTOR = 20.0  #: least ratio of the probabilities of another class and of the label
FOLDS = 5
_SEED = 1  # of the folds
NAMED = 3  #: suspects that a notice names
LEAST_IMAGES = 30  #: labels of smaller sets are checked only on request
MOST_WORK = 1_000_000  #: images times classes; labels of larger sets are checked only on request (seconds)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Suspect:
    """An image whose label looks wrong."""

    index: int  #: in the image set
    key: str
    label: str  #: its class; of several labels one that it has, or "not" one that it does not have
    suggestion: str
    confidence: float  #: probability of the suggestion, out of sample
    label_probability: float  #: out of sample

    @property
    def factor(self) -> float:
        """Ratio of the probabilities of suggestion and label."""
        return self.confidence / max(self.label_probability, 1e-12)


def out_of_sample(features: Tensor, labels: Tensor, classes: int, units: IntArray | None = None) -> Floats:
    """Probabilities [n, C] by classifiers that did not see the image, from features [n, E] and labels [n].

    An image that is the only one of its class, except for copies, cannot be judged: its class has
    probability 1. `units` [n]: copies of an image have the same; None: images with equal features are copies.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    unit = torch.nn.functional.normalize(features.double(), dim=1)
    x = torch.nn.functional.normalize(unit - unit.mean(dim=0), dim=1).numpy()
    y = labels.numpy()
    probabilities = np.zeros((len(y), classes))
    probabilities[np.arange(len(y)), y] = 1.0
    fold = feature_folds(features, labels, FOLDS, units, _SEED).numpy()
    judged = np.flatnonzero(fold >= 0)
    if len(np.unique(y[judged])) < 2:
        return probabilities
    for number in np.unique(fold[judged]):
        training, held_out = judged[fold[judged] != number], judged[fold[judged] == number]
        with warnings.catch_warnings():  # the last digits of a probability do not matter here
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LogisticRegression(C=1.0, max_iter=200).fit(x[training], y[training])
        rows = np.zeros((len(held_out), classes))
        rows[:, model.classes_] = model.predict_proba(x[held_out])
        probabilities[held_out] = rows
    probabilities[judged] = _calibrate(probabilities[judged], y[judged])
    return probabilities


def _calibrate(probabilities: Floats, labels: npt.NDArray[np.int64]) -> Floats:
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


def label_probabilities(features: Tensor, targets: Tensor, units: IntArray | None = None) -> Floats:
    """`out_of_sample` of several labels: how probable each is for each image [n, C], from bool [n, C].

    Where no classifier can be fitted, the probability is that of the label: 0 or 1.
    """
    from sklearn.linear_model import LogisticRegression

    unit = torch.nn.functional.normalize(features.double(), dim=1)
    x = torch.nn.functional.normalize(unit - unit.mean(dim=0), dim=1)
    fold = feature_folds(features, main_labels(targets), FOLDS, units, _SEED)
    logits, known = torch.zeros(targets.shape, dtype=torch.float64), torch.zeros_like(targets)
    for number in fold[fold >= 0].unique().tolist():
        held, rest = fold == number, fold != number
        both = targets[rest].any(dim=0) & ~targets[rest].all(dim=0)
        known[held] = both  # a class that only held-out images have cannot be judged
        for label in both.nonzero()[:, 0].tolist():
            probe = LogisticRegression(C=1.0, max_iter=200).fit(x[rest], targets[rest, label])
            logits[held, label] = torch.from_numpy(probe.decision_function(x[held]))
    result = targets.double()
    if bool(known.any()):
        rows = (fold >= 0).nonzero()[:, 0]
        temperature, biases = fit_sigmoids(logits[rows], targets[rows])
        result = torch.where(known, (logits / temperature + biases).sigmoid(), result)
    probabilities: Floats = result.numpy()
    return probabilities


def _find_suspect_sets(images: ImageSet, probabilities: Floats, targets: Tensor) -> tuple[Suspect, ...]:
    """Labels that look wrong ("red", or "not red"?) and labels that look missing ("not red", or "red"?)."""
    present = targets.numpy()  # [n, C]
    label_probability = np.where(present, probabilities, 1 - probabilities)
    indices = np.argwhere(1 - label_probability >= FACTOR * label_probability)
    order = np.argsort(label_probability[tuple(indices.T)], kind="stable")
    suspects = []
    for index, label in indices[order].tolist():
        name = images.classes[label]
        label_name, other = (name, f"not {name}") if present[index, label] else (f"not {name}", name)
        value = float(label_probability[index, label])
        suspects.append(Suspect(index, images.key(index), label_name, other, 1 - value, value))
    return tuple(suspects)


def rank_labels(probabilities: Floats, labels: Tensor) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Indices of the labels that look wrong, the least probable first, and the best other class [n]."""
    y = labels.numpy()
    rows = np.arange(len(y))
    others = probabilities.copy()
    label_probability = others[rows, y]
    others[rows, y] = -1.0
    best = others.argmax(axis=1)
    suspected = others[rows, best] >= FACTOR * label_probability
    return [
        index for index in np.argsort(label_probability, kind="stable").tolist() if suspected[index]
    ], best


def find_wrong_labels(
    images: ImageSet, features: Tensor, units: IntArray | None = None
) -> tuple[Suspect, ...]:
    """Images whose labels look wrong, the most suspicious first, from frozen features [n, E].

    `units` [n]: copies of an image have the same; None: images with equal features are copies.
    """
    targets = targets_of(images)
    if targets is not None:
        targets = targets.cpu()
        return _find_suspect_sets(images, label_probabilities(features.cpu(), targets, units), targets)
    labels = images.labels.cpu()
    probabilities = out_of_sample(features.cpu(), labels, len(images.classes), units)
    indices, best = rank_labels(probabilities, labels)
    names = labels.tolist()
    return tuple(
        Suspect(
            index,
            images.key(index),
            images.classes[names[index]],
            images.classes[best[index]],
            float(probabilities[index, best[index]]),
            float(probabilities[index, names[index]]),
        )
        for index in indices
    )


def label_summary(images: ImageSet, features: Tensor, units: IntArray | None = None) -> dict[str, Any] | None:
    """The entry `labels` of a run's `metrics.json`; None if there are too few images or too many to check."""
    if not LEAST_IMAGES <= len(images) <= MOST_WORK / len(images.classes):
        return None
    suspects = find_wrong_labels(images, features, units=units)
    first = [
        {"image": suspect.key, "label": suspect.label, "suggestion": suspect.suggestion}
        for suspect in suspects[:NAMED]
    ]
    return {"images": len(images), "look_wrong": len(suspects), "first": first}


def label_sentence(labels: Mapping[str, Any] | None) -> str:
    """The same in words; "" where no label looks wrong.

    >>> first = {"image": "a.jpg", "label": "cat", "suggestion": "dog"}
    >>> label_sentence({"images": 90, "look_wrong": 1, "first": [first]})
    "1 of 90 training labels looks wrong: 'a.jpg' is labeled cat and looks like dog"
    """
    if not labels or not labels["look_wrong"]:
        return ""
    count, single = labels["look_wrong"], labels["look_wrong"] == 1
    named = "; ".join(
        f"{each['image']!r} is labeled {each['label']} and looks like {each['suggestion']}"
        for each in labels["first"]
    )
    rest = count - len(labels["first"])
    named += f"; and {rest} more" if rest > 0 else ""
    return f"{count} of {labels['images']} training labels look{'s' if single else ''} wrong: {named}"
