"""Copies are found between sets and across classes; other images are not."""

from __future__ import annotations

import numpy as np

from dear.data.images import ListedImages
from dear.shortcuts.edits import recompress
from dear.shortcuts.properties import measure_properties
from dear.tasks.audit.duplicates import near_duplicates


def test_copies_between_two_sets(photos: ListedImages) -> None:
    test = ListedImages(
        (recompress(photos.image(4), 60), photos.image(70).resize((80, 80)), photos.image(5).rotate(180)),
        photos.labels[:3], photos.classes,
    )  # fmt: skip
    train = photos.subset([index for index in range(len(photos)) if index != 5])
    pairs = near_duplicates(measure_properties(train).prints, measure_properties(test).prints)
    assert {(one.first, one.second, one.kind) for one in pairs} == {(4, 0, "copy"), (69, 1, "copy")}


def test_copies_across_classes_only(photos: ListedImages) -> None:
    items = [photos.image(index) for index in range(6)]
    images = ListedImages((*items, items[0], items[1]), photos.labels[:8], photos.classes)
    measured = measure_properties(images).prints
    labels = [0, 0, 1, 1, 2, 2, 0, 1]
    assert [(one.first, one.second) for one in near_duplicates(measured, labels=labels)] == [(1, 7)]


def test_features_find_what_hashes_do_not(photos: ListedImages) -> None:
    measured = measure_properties(photos.subset(range(4))).prints
    features = np.eye(4) + 0.0
    features[3] = features[0] + 1e-3
    (pair,) = near_duplicates(measured, features=(features, features), labels=[0, 1, 2, 3])
    assert (pair.first, pair.second, pair.kind) == (0, 3, "alike")
