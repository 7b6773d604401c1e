"""An audit lists copies between training and test images and across classes; other images are not copies."""

from __future__ import annotations

import torch

from dear.data.images import ListedImages
from dear.shortcuts.edits import recompress
from dear.tasks.audit.properties import check_properties
from dear.utils.progress import silent


def listed(images: ListedImages, held_out: ListedImages | None = None) -> set[tuple[str, str, str]]:
    pairs = check_properties(images, held_out, silent).duplicates
    return {(pair.first, pair.second, pair.where) for pair in pairs}


def test_copies_between_two_sets(photos: ListedImages) -> None:
    test = ListedImages(
        (recompress(photos.image(4), 60), photos.image(70).resize((80, 80)), photos.image(5).rotate(180)),
        photos.labels[:3], photos.classes,
    )  # fmt: skip
    train = photos.subset([index for index in range(len(photos)) if index != 5])
    keys = {(train.key(4), test.key(0)), (train.key(69), test.key(1))}
    assert listed(train, test) == {(*pair, "training and test") for pair in keys}


def test_copies_across_classes_only(photos: ListedImages) -> None:
    items = [photos.image(index) for index in range(6)]
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 0, 1])
    images = ListedImages((*items, items[0], items[1]), labels, photos.classes)
    assert listed(images) == {(images.key(1), images.key(7), "two classes")}
