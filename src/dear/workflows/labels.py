"""Labels that look wrong: images whose own class is far less probable than another, by cross-validation.

A logistic regression on frozen image features is trained on all folds but one and answers the images of that
fold, so no image is judged by a classifier that saw its label. An image is suspected where another class is
`FACTOR` times as probable as its own; suspects are sorted by the probability of their own label, which ranks
wrong labels better than that ratio does and is cleanlab's self-confidence (`benchmarks/wrong_labels.py`).
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dear._io.files import write_atomic
from dear._io.progress import Progress
from dear.clip.model import Clip
from dear.data.images import FileImages, ImageSet
from dear.data.open import open_data
from dear.errors import DataError
from dear.report.labels_page import LabelFacts, LabelRow, labels_page
from dear.report.page import thumbnail
from dear.runs.feature_cache import FeatureCache

FACTOR = 20.0  #: how many times more probable another class must be
FOLDS = 5
SHOWN = 200  #: suspects on the page, the most suspicious ones
MOST_ROWS = 200_000  #: of a table that a page can correct

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


def out_of_sample(features: Tensor, labels: Tensor, classes: int, seed: int = 1) -> Floats:
    """Probabilities [n, C] by classifiers that did not see the image.

    An image that is the only one of its class cannot be judged: its own class has probability 1.

    Args:
        features: image features [n, E].
        labels: class of each image [n].
        classes: number of classes, C.
        seed: of the folds.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    unit = torch.nn.functional.normalize(features.double(), dim=1)
    x = torch.nn.functional.normalize(unit - unit.mean(dim=0), dim=1).numpy()
    y = labels.numpy()
    found = np.zeros((len(y), classes))
    counts = np.bincount(y, minlength=classes)
    found[np.arange(len(y)), y] = 1.0
    several = np.flatnonzero(counts[y] > 1)
    folds = min(FOLDS, int(counts[counts > 1].min(initial=FOLDS)))
    if len(np.unique(y[several])) < 2:
        return found
    for known, asked in StratifiedKFold(folds, shuffle=True, random_state=seed).split(several, y[several]):
        model = LogisticRegression(C=1.0, max_iter=200).fit(x[several[known]], y[several[known]])
        rows = np.zeros((len(asked), classes))
        rows[:, model.classes_] = model.predict_proba(x[several[asked]])
        found[several[asked]] = rows
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


def find_suspects(
    images: ImageSet, clip: Clip, seed: int = 1, progress: Progress | None = None
) -> tuple[Suspect, ...]:
    """Images of a set whose labels look wrong, the most suspicious first.

    Example:
        >>> from dear import load, open_data
        >>> find_suspects(open_data("world:vehicles", "train"), load("mini"))   # doctest: +SKIP
    """
    if len(images.classes) < 2:
        raise DataError(f"{images.name}: has one class only; labels are compared with other classes")
    features = FeatureCache().image_features(clip, images, progress)
    probabilities = out_of_sample(features, images.labels, len(images.classes), seed)
    places, best = rank_labels(probabilities, images.labels)
    labels = images.labels.tolist()
    return tuple(
        Suspect(
            index,
            images.key(index),
            images.classes[labels[index]],
            images.classes[best[index]],
            float(probabilities[index, best[index]]),
            float(probabilities[index, labels[index]]),
        )
        for index in places
    )


def open_all(data: str, root: str | None = None) -> tuple[ImageSet, tuple[str, ...]]:
    """All images of a dataset, and the split of each."""
    every = open_data(data, "all", root=root)
    found: dict[str, str] = {}
    for split in ("train", "val", "test"):
        with suppress(DataError):  # not every dataset has every split
            images = open_data(data, split, root=root)
            for index in range(len(images)):
                found.setdefault(images.key(index), split)
    return every, tuple(found.get(every.key(index), "train") for index in range(len(every)))


def write_label_page(
    images: FileImages,
    splits: Sequence[str],
    suspects: Sequence[Suspect],
    clip: Clip,
    out: str | os.PathLike[str],
) -> None:
    """Write the page on which suspects are kept, changed or dropped.

    The page makes a corrected table of *all* images of the set, each in its split, to be saved in the folder
    of the images and given as data. Paths in it are relative to that folder.

    Raises:
        DataError: the set is too large for one page.
    """
    if len(images) > MOST_ROWS:
        raise DataError(f"{images.name}: {len(images):,} images are too many for one page; use the CSV file")
    rows = tuple(
        LabelRow(
            index=suspect.index,
            image=thumbnail(images.image(suspect.index), 128),
            path=suspect.key,
            label=suspect.label,
            suggestion=suspect.suggestion,
            confidence=suspect.confidence,
            own=suspect.own,
        )
        for suspect in suspects[:SHOWN]
    )
    facts = LabelFacts(
        name=images.name,
        images=len(images),
        found=len(suspects),
        backbone=clip.name,
        factor=FACTOR,
        folder=str(images.root),
        rows=rows,
        classes=images.classes,
        paths=images.paths,
        labels=tuple(images.labels.tolist()),
        splits=tuple(splits),
    )
    write_atomic(out, labels_page(facts))


def write_suspects(suspects: Sequence[Suspect], out: str | os.PathLike[str]) -> None:
    """Write suspects as CSV: path, label, suggestion, confidence, own, factor."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("path", "label", "suggestion", "confidence", "own", "factor"))
    for each in suspects:
        table.writerow(
            (
                each.key,
                each.label,
                each.suggestion,
                f"{each.confidence:.4f}",
                f"{each.own:.4f}",
                f"{each.factor:.1f}",
            )
        )
    write_atomic(Path(out), text.getvalue())
