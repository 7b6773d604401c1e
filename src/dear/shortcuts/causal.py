"""Causal test of a shortcut: predictions for held-out images that are edited to have the property."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.shortcuts.edits import can_remove, transfer
from dear.shortcuts.find import Shortcut

Answers = Callable[[Sequence[Image.Image]], NDArray[np.int64]]
"""Maps images to predicted labels."""

MIN_RELIANCE = 0.03  #: smallest fraction of predictions that an edit moves to the class if a model uses it
MAX_UNUSED = 0.05  #: a model does not use a property if the interval of that fraction ends below this
IMAGES = 60  #: held-out images of other classes that are edited first
MORE_IMAGES = 240  #: number of images if the first ones do not decide
Z = 1.96  #: quantile of a 95% confidence interval


@dataclass(frozen=True)
class EditTest:
    """Predictions for held-out images before and after an edit that transfers the property of a class."""

    class_name: str
    images: int  #: held-out images of other classes
    plain: float  #: fraction of them predicted as the class before the edit
    edited: float  #: fraction of them predicted as the class after the edit
    moved_in: int  #: predictions that the edit moved to the class
    moved_out: int  #: predictions that the edit moved away from the class
    #: accuracy on held-out images of the class, unchanged and with the property removed; None: not tested
    accuracy: float | None = None
    accuracy_without: float | None = None

    @property
    def extra(self) -> float:
        """Net fraction of predictions that the edit moves to the class."""
        return self.edited - self.plain

    @property
    def interval(self) -> tuple[float, float]:
        """95% confidence interval of `extra`: paired proportions, half an image added per cell."""
        # Agresti and Min (2005), Simple improved confidence intervals for comparing matched proportions.
        count, moved_in, moved_out = self.images + 2, self.moved_in + 0.5, self.moved_out + 0.5
        middle = (moved_in - moved_out) / count
        half = Z * np.sqrt(moved_in + moved_out - (moved_in - moved_out) ** 2 / count) / count
        return max(-1.0, float(middle - half)), min(1.0, float(middle + half))

    @property
    def relies(self) -> bool:
        """Whether the model uses the property: the edit moves predictions, by more than chance."""
        return self.extra >= MIN_RELIANCE and self.interval[0] > 0

    @property
    def uncertain(self) -> bool:
        """Whether too few images were tested to decide."""
        return not self.relies and self.interval[1] >= MAX_UNUSED

    @property
    def sentence(self) -> str:
        """The result in words."""
        low, high = (100 * end for end in self.interval)
        moved = (
            f"{self.plain:.1%} of {self.images} held-out images of other classes are predicted as "
            f"{self.class_name}, and {self.edited:.1%} when edited to have the property (95% interval of the "
            f"difference: {low:+.1f} to {high:+.1f} points)."
        )
        if self.accuracy is None or self.accuracy_without is None:
            return moved
        return (
            f"{moved} Accuracy on held-out images of {self.class_name}: {self.accuracy:.1%} unchanged, "
            f"{self.accuracy_without:.1%} with the property removed."
        )

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "images": self.images,
            "predicted_as_class": self.plain,
            "predicted_as_class_edited": self.edited,
            "interval": list(self.interval),
            "relies": self.relies,
            "class_accuracy": self.accuracy,
            "class_accuracy_without": self.accuracy_without,
        }


@dataclass(frozen=True, eq=False)
class EditedSet:
    """Held-out images before and after an edit; several models can be tested on the same ones."""

    shortcut: Shortcut
    plain: tuple[Image.Image, ...]
    edited: tuple[Image.Image, ...]
    members: tuple[Image.Image, ...]  #: held-out images of the class
    members_without: tuple[Image.Image, ...]


def edit_held_out(
    shortcut: Shortcut, held_out: ImageSet, training: ImageSet, images: int = IMAGES, seed: int = 1
) -> EditedSet:
    """The images of a `causal_test`: at most `images` held-out ones of other classes.

    Donors come from the training images; both sets have the same classes.
    """
    if not shortcut.kind:
        raise UsageError(
            f"a causal test needs a property of the pixels, got {shortcut.name}, a property of files that a "
            "model cannot see"
        )
    rng = random.Random(seed)
    (class_rows, other_rows), (donors, donors_without) = (
        [(member == in_class).nonzero()[:, 0].tolist() for in_class in (True, False)]
        for member in (held_out.labels == shortcut.label, training.labels == shortcut.label)
    )
    if not other_rows or not donors:
        raise UsageError(
            f"{held_out.name} must have held-out images of classes other than {shortcut.class_name}, got "
            f"{len(other_rows)}, and training images of it, got {len(donors)}"
        )
    sample = rng.sample(other_rows, min(images, len(other_rows)))
    mask = None if shortcut.mark is None else shortcut.mark.mask
    marked_donors = _images_with_mark(shortcut, training, donors)

    def edit(image: Image.Image, donors: Sequence[int]) -> Image.Image:
        return transfer(shortcut.kind, image, training.image(rng.choice(donors)), mask, shortcut.name)

    plain = [held_out.image(row) for row in sample]
    removable = can_remove(shortcut.kind) and donors_without
    members = [held_out.image(row) for row in class_rows[:images]] if removable else []
    return EditedSet(
        shortcut,
        tuple(plain),
        tuple(edit(image, marked_donors) for image in plain),
        tuple(members),
        tuple(edit(image, donors_without) for image in members),
    )


def _images_with_mark(shortcut: Shortcut, training: ImageSet, members: Sequence[int]) -> list[int]:
    """The images of the class that have the mark: all, or those that look most like it."""
    mark = shortcut.mark
    if mark is None or mark.share == 1:
        return list(members)
    distances = []
    for row in members:
        small = np.asarray(training.image(row).resize(mark.mask.shape[::-1]))
        distances.append(float(np.abs(small[mark.mask].astype(float) - mark.look[mark.mask]).mean()))
    order = np.argsort(distances)[: max(1, round(mark.share * len(members)))]
    return [members[index] for index in order]


def causal_test(edited: EditedSet, answers: Answers) -> EditTest:
    """Compare a model's predictions for held-out images before and after the edit."""
    label = edited.shortcut.label
    before, after = answers(edited.plain) == label, answers(edited.edited) == label
    accuracy, accuracy_without = None, None
    if edited.members:
        accuracy = float((answers(edited.members) == label).mean())
        accuracy_without = float((answers(edited.members_without) == label).mean())
    return EditTest(
        edited.shortcut.class_name,
        len(before),
        float(before.mean()),
        float(after.mean()),
        int((after & ~before).sum()),
        int((before & ~after).sum()),
        accuracy,
        accuracy_without,
    )
