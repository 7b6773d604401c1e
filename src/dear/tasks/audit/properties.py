"""Image properties, marks, file facts and near duplicates; and edits that test whether a model uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dear.data.duplicates import Prints, matching_pairs, read_prints
from dear.data.images import ImageSet, targets_of
from dear.runs.model import Model
from dear.shortcuts.causal import MORE_IMAGES, EditTest, causal_test, edit_held_out
from dear.shortcuts.find import MIN_IMAGES, Search, Shortcut, search_properties
from dear.shortcuts.properties import ImageMeasurements, measure_properties
from dear.tasks.audit.several_labels import (
    label_answers,
    label_set_numbers,
    label_view,
    members,
    search_labels,
)
from dear.utils.progress import Progress

TESTED = 10  #: findings that are tested by edits, those with the highest scores


@dataclass(frozen=True)
class Pair:
    """Two images that are copies of each other."""

    first: str
    second: str
    where: str  #: "training and test" or "two classes"


@dataclass(frozen=True, eq=False)
class ImageCheck:
    """Properties of the images and near duplicates."""

    measured: ImageMeasurements
    search: Search  #: properties that separate one class from all others
    duplicates: tuple[Pair, ...] = ()
    too_few: tuple[str, ...] = ()  #: classes with too few images to score
    compared: int | None = (
        None  #: test images that were compared with the training images; None: no test images
    )

    @property
    def closest(self) -> str:
        """The property that comes closest to the limit, in a sentence; empty: none is near."""
        one = self.search.closest
        if one is None:
            return ""
        return (
            f"Closest to a finding: images of {one.class_name} {one.clause} ({one.title}: score "
            f"{one.score:.2f}, at least {self.search.closest_limit:.2f} is required)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        closest = self.search.closest
        return {
            "closest": None if closest is None else closest.to_dict(),
            "duplicates": [asdict(pair) for pair in self.duplicates],
            "test_images_compared": self.compared,
            "classes_with_too_few_images": list(self.too_few),
        }


def check_properties(images: ImageSet, held_out: ImageSet | None, progress: Progress) -> ImageCheck:
    """Score the properties of each class against the rest, and find near duplicates.

    Copies of training images among the test images, and of images of one class in another, are listed.
    """
    measured = measure_properties(images, progress)
    labels = label_set_numbers(images)
    pairs = [
        Pair(images.key(first), images.key(second), "two classes")
        for first, second in _copies(measured.prints, None, progress)
        if labels[first] != labels[second]
    ]
    compared = None
    if held_out is not None:
        readable, prints = read_prints(held_out)
        compared = len(readable)
        pairs += [
            Pair(images.key(first), held_out.key(int(readable[second])), "training and test")
            for first, second in _copies(measured.prints, prints, progress)
        ]
    counts = [int(members(images, label).sum()) for label in range(len(images.classes))]
    few = tuple(name for name, count in zip(images.classes, counts, strict=True) if count < MIN_IMAGES)
    if targets_of(images) is not None:
        search = search_labels(measured, images)
    else:
        search = search_properties(measured, labels, images.classes)
    return ImageCheck(measured, search, tuple(pairs), few, compared)


def _copies(first: Prints, second: Prints | None, progress: Progress) -> list[tuple[int, int]]:
    """Indices of the pairs of copies in two sets, or within the first, the most similar ones first."""
    difference: dict[tuple[int, int], float] = {}
    for rows, columns, apart in matching_pairs(first, second, progress):
        difference |= dict(
            zip(zip(rows.tolist(), columns.tolist(), strict=True), apart.tolist(), strict=True)
        )
    return sorted(difference, key=lambda pair: (difference[pair], pair))


def edit_tests(
    shortcuts: Sequence[Shortcut],
    model: Model,
    images: ImageSet,
    held_out: ImageSet,
    mode: str | None,
    progress: Progress,
) -> dict[str, EditTest]:
    """Test by edits of held-out images whether a model uses the properties, by class name.

    More images are edited where the first ones are too few to decide.
    """
    results: dict[str, EditTest] = {}
    tested = [one for one in shortcuts if one.kind][:TESTED]
    predict = label_predictor(model, images.classes, mode)
    for number, shortcut in enumerate(tested):
        one = shortcut
        if targets_of(images) is not None:  # of several labels this one counts
            views = label_view(held_out, one.label), label_view(images, one.label)
            predict = label_answers(model, one.class_name, mode)
            one = replace(one, label=0)
        else:
            views = held_out, images
        test = causal_test(edit_held_out(one, *views), predict)
        if test.uncertain and test.images < int((views[0].labels != one.label).sum()):
            test = causal_test(edit_held_out(one, *views, MORE_IMAGES), predict)
        results[one.class_name] = test
        progress("edits", number + 1, len(tested))
    return results


def label_predictor(
    model: Model, classes: Sequence[str], mode: str | None = None
) -> Callable[[Sequence[Image.Image]], NDArray[np.int64]]:
    """A function from images to predicted labels that count into `classes`; -1 for a class not among them."""
    place = {name: number for number, name in enumerate(classes)}
    numbers = np.array([place.get(name, -1) for name in model.classes])

    def predict(images: Sequence[Image.Image]) -> NDArray[np.int64]:
        logits = model.logits(list(images))[model.pick_mode(mode)]
        labels: NDArray[np.int64] = numbers[logits.argmax(dim=1).numpy()]
        return labels

    return predict
