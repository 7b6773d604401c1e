"""Several labels per image in an audit: each label by itself, images that have it against all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dear.data.images import ImageSet, targets_of
from dear.data.unlabeled import Relabeled
from dear.runs.model import Model
from dear.shortcuts.find import MIN_IMAGES, Search, search_properties
from dear.shortcuts.properties import ImageMeasurements


def label_view(images: ImageSet, label: int) -> ImageSet:
    """The images with one label alone: 0 has it, 1 does not."""
    name = images.classes[label]
    return Relabeled(images, (~members(images, label)).long(), (name, f"not {name}"))


def members(images: ImageSet, label: int) -> Tensor:
    """Whether each image is of a class, or has a label, bool [n]."""
    targets = targets_of(images)
    return (images.labels == label).cpu() if targets is None else targets[:, label].cpu()


def scored_labels(images: ImageSet) -> list[int]:
    """The labels that enough images have and enough do not have, to compare them."""
    targets = targets_of(images)
    assert targets is not None
    counts = targets.sum(dim=0).tolist()
    return [label for label, count in enumerate(counts) if MIN_IMAGES <= count <= len(targets) - MIN_IMAGES]


def search_labels(measured: ImageMeasurements, images: ImageSet) -> Search:
    """`search_properties` of every label against all other images."""
    shortcuts, near = [], []
    for label in scored_labels(images):
        view = label_view(images, label)
        search = search_properties(measured, view.labels.tolist(), view.classes)
        shortcuts += [replace(one, label=label) for one in search.shortcuts if one.label == 0]
        if search.closest is not None and search.closest.label == 0:
            near.append((search.closest_limit - search.closest.score, label, search))
    ordered = tuple(sorted(shortcuts, key=lambda one: -one.score))
    if not near:
        return Search(ordered, None, 0.0)
    _, label, search = min(near, key=lambda one: one[:2])
    assert search.closest is not None
    return Search(ordered, replace(search.closest, label=label), search.closest_limit)


def label_set_numbers(images: ImageSet) -> list[int]:
    """The same number for images with the same labels, [n]."""
    targets = targets_of(images)
    numbers = images.labels if targets is None else targets.unique(dim=0, return_inverse=True)[1]
    result: list[int] = numbers.tolist()
    return result


def label_answers(
    model: Model, name: str, mode: str | None
) -> Callable[[Sequence[Image.Image]], NDArray[np.int64]]:
    """A function from images to 0 where a label is answered, else 1."""

    def predict(images: Sequence[Image.Image]) -> NDArray[np.int64]:
        answers = model.answers(list(images), top=1, mode=mode)
        return np.array([int(name not in (answer.labels or ())) for answer in answers], dtype=np.int64)

    return predict


def rest_texts(texts: Tensor, label: int) -> Tensor:
    """Features of the prompt of a label and of the mean of all others, [2, E], from those of all [C, E]."""
    others = torch.cat([texts[:label], texts[label + 1 :]])
    return torch.stack([texts[label], others.mean(dim=0) if len(others) else torch.zeros_like(texts[label])])
