"""Summary of an adaptation: accuracy on held-out images before and after."""

from __future__ import annotations

from dataclasses import dataclass

from dear._io.progress import Progress
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.errors import DataError
from dear.methods import build_method
from dear.methods.base import Method
from dear.workflows.evaluate import evaluate_readable
from dear.workflows.options import PathLike

MOST_IMAGES = 1000  #: held-out images that are looked at after training


@dataclass(frozen=True)
class HeldOut:
    """Accuracy on images that were not trained on, as fractions of 1.

    Attributes:
        images: how many images were answered.
        available: how many held-out images there are.
        before: accuracy of the frozen backbone (zero-shot).
        after: accuracy of the adapted model, by mode.
    """

    images: int
    available: int
    before: float
    after: dict[str, float]


def open_held_out(data: PathLike | ImageSet, root: PathLike | None = None) -> ImageSet | None:
    """The test split of a dataset, or None where it has none."""
    if isinstance(data, ImageSet):
        return None
    try:
        found = open_data(data, "test", root=root)
    except DataError:
        return None
    return found if len(found) else None


def held_out_accuracy(method: Method, images: ImageSet, progress: Progress | None = None) -> HeldOut:
    """Accuracy before and after, on at most `MOST_IMAGES` images spread evenly over the set.

    Images that cannot be read are left out.
    """
    step = -(-len(images) // MOST_IMAGES)
    some = images if step == 1 else images.subset(range(0, len(images), step))
    frozen = build_method("zeroshot", method.clip, method.classes, template=method.template)
    before = evaluate_readable(frozen, some, unreadable="skip", progress=progress)
    after = evaluate_readable(method, some, unreadable="skip", progress=progress)
    return HeldOut(len(before.labels), len(images), before.accuracy["default"], after.accuracy)
