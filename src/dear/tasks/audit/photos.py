"""The part of an audit that looks at the images themselves: properties, marks, files, duplicates, edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dear.data.duplicates import read_prints
from dear.data.images import ImageSet
from dear.runs.model import Model
from dear.shortcuts.causal import Causal, causal_test, edited_set
from dear.shortcuts.find import FEWEST, Shortcut, find_shortcuts
from dear.shortcuts.properties import Measured, measure
from dear.tasks.audit.duplicates import near_duplicates
from dear.utils.progress import Progress

TESTED = 10  #: findings that are tested by edits, the strongest
EDITED = 60  #: held-out images of other classes that are edited for each


@dataclass(frozen=True)
class Pair:
    """Two images that are nearly the same."""

    first: str
    second: str
    where: str  #: "training and test" or "two classes"
    kind: str  #: "copy" or "alike"


@dataclass(frozen=True, eq=False)
class PhotoAudit:
    """What the images alone tell."""

    measured: Measured
    shortcuts: tuple[Shortcut, ...]  #: one per class that stands out, the clearest first
    duplicates: tuple[Pair, ...] = ()
    #: by class name: what edits do to the model's answers on held-out images
    causal: dict[str, Causal] = field(default_factory=dict)
    too_few: tuple[str, ...] = ()  #: classes with too few images to judge
    compared: int | None = (
        None  #: test images that were compared with the training images; None: there are none
    )

    def report(self) -> dict[str, Any]:
        """Plain values for JSON."""
        edits = {name: test.report() for name, test in self.causal.items()}
        return {
            "findings": [{**one.report(), "edits": edits.get(one.class_name)} for one in self.shortcuts],
            "duplicates": [asdict(pair) for pair in self.duplicates],
            "test_images_compared": self.compared,
            "classes_with_too_few_images": list(self.too_few),
        }


def look_at_images(images: ImageSet, held_out: ImageSet | None, progress: Progress) -> PhotoAudit:
    """Properties of each class against the rest, and images that are nearly the same.

    Copies of training images among the test images, and of images of one class in another, are listed.
    """
    measured = measure(images, progress)
    labels = images.labels.tolist()
    pairs = [
        Pair(images.key(one.first), images.key(one.second), "two classes", one.kind)
        for one in near_duplicates(measured.prints, labels=labels)
    ]
    compared = None
    if held_out is not None:
        readable, prints = read_prints(held_out)
        compared = len(readable)
        pairs += [
            Pair(
                images.key(one.first), held_out.key(int(readable[one.second])), "training and test", one.kind
            )
            for one in near_duplicates(measured.prints, prints)
        ]
    counts = np.bincount(labels, minlength=len(images.classes))
    few = tuple(name for name, count in zip(images.classes, counts, strict=True) if count < FEWEST)
    shortcuts = find_shortcuts(measured, labels, images.classes)
    return PhotoAudit(measured, shortcuts, tuple(pairs), too_few=few, compared=compared)


def edit_tests(
    found: PhotoAudit,
    model: Model,
    images: ImageSet,
    held_out: ImageSet,
    mode: str | None,
    progress: Progress,
) -> dict[str, Causal]:
    """What edits toward each finding do to a model's answers on held-out images, by class name."""
    results: dict[str, Causal] = {}
    tested = [one for one in found.shortcuts if one.kind][:TESTED]
    answer = answers_of(model, images.classes, mode)
    for number, one in enumerate(tested):
        results[one.class_name] = causal_test(edited_set(one, held_out, images, EDITED), answer)
        progress("edits", number + 1, len(tested))
    return results


def answers_of(
    model: Model, classes: Sequence[str], mode: str | None = None
) -> Callable[[Sequence[Image.Image]], NDArray[np.int64]]:
    """A model's answers as labels that count into `classes`; -1 for a class that is none of them."""
    place = {name: number for number, name in enumerate(classes)}
    numbers = np.array([place.get(name, -1) for name in model.classes])

    def answer(images: Sequence[Image.Image]) -> NDArray[np.int64]:
        logits = model.logits(list(images))[model.pick_mode(mode)]
        answers: NDArray[np.int64] = numbers[logits.argmax(dim=1).numpy()]
        return answers

    return answer
