"""Does a model use a property? Answers for held-out images of other classes that are edited to have it."""

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

MIN_RELIANCE = 0.03  #: share of answers that an edit must move to the class
MAX_UNUSED = 0.05  #: upper end of the interval of that share, below which a model does not use a property
IMAGES = 60  #: held-out images of other classes that are edited at first
MORE_IMAGES = 240  #: where those are too few to decide
Z = 1.96  #: of a 95% confidence interval


@dataclass(frozen=True)
class EditTest:
    """Answers for held-out images before and after an edit that transfers the property of a class."""

    class_name: str
    images: int  #: held-out images of other classes
    plain: float  #: share of them that is predicted as the class, before and after the edit
    edited: float
    moved_in: int  #: answers that moved to the class and away from it
    moved_out: int
    #: accuracy on held-out images of the class, as they are and with the property removed; None: not tested
    accuracy: float | None = None
    accuracy_without: float | None = None

    @property
    def extra(self) -> float:
        """Share of answers that the edit moves to the class."""
        return self.edited - self.plain

    @property
    def interval(self) -> tuple[float, float]:
        """95% confidence interval of `extra`: paired proportions, half an image added per cell."""
        # Agresti and Min (2005), Simple improved confidence intervals for comparing matched proportions.
        count, moved_in, moved_out = self.images + 2, self.moved_in + 0.5, self.moved_out + 0.5
        middle = (moved_in - moved_out) / count
        half = Z * np.sqrt(moved_in + moved_out - (moved_in - moved_out) ** 2 / count) / count
        return float(middle - half), float(middle + half)

    @property
    def relies(self) -> bool:
        """Whether the model uses the property: the edit moves answers, and chance does not explain them."""
        return self.extra >= MIN_RELIANCE and self.interval[0] > 0

    @property
    def uncertain(self) -> bool:
        """Whether too few images were tested to decide."""
        return not self.relies and self.interval[1] >= MAX_UNUSED

    @property
    def sentence(self) -> str:
        """The result for people."""
        low, high = (100 * end for end in self.interval)
        moved = (
            f"{self.plain:.1%} of {self.images} held-out images of other classes are predicted as "
            f"{self.class_name}, and {self.edited:.1%} when edited to have the property (95% interval of the "
            f"difference: {low:+.1f} to {high:+.1f} points)."
        )
        if self.accuracy is None or self.accuracy_without is None:
            return moved
        return (
            f"{moved} Accuracy on held-out {self.class_name}: {self.accuracy:.1%}, without the property "
            f"{self.accuracy_without:.1%}."
        )

    def report(self) -> dict[str, object]:
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


def edited_set(
    shortcut: Shortcut, held_out: ImageSet, training: ImageSet, images: int = IMAGES, seed: int = 1
) -> EditedSet:
    """The images of a `causal_test`: at most `images` held-out ones of other classes.

    Donors come from the training images; labels of both sets count into the same classes.
    """
    if not shortcut.kind:
        raise UsageError(f"{shortcut.name} is a fact of files that no model sees; there is nothing to edit")
    rng = random.Random(seed)
    (class_places, others), (with_it, without_it) = (
        [(member == wanted).nonzero()[:, 0].tolist() for wanted in (True, False)]
        for member in (held_out.labels == shortcut.label, training.labels == shortcut.label)
    )
    if not others or not with_it:
        raise UsageError(
            f"{held_out.name}: has no held-out images of classes other than {shortcut.class_name}"
        )
    chosen = rng.sample(others, min(images, len(others)))
    mask = None if shortcut.mark is None else shortcut.mark.mask
    marked = _marked(shortcut, training, with_it)

    def edit(image: Image.Image, donors: Sequence[int]) -> Image.Image:
        return transfer(shortcut.kind, image, training.image(rng.choice(donors)), mask, shortcut.name)

    plain = [held_out.image(place) for place in chosen]
    removable = can_remove(shortcut.kind) and without_it
    members = [held_out.image(place) for place in class_places[:images]] if removable else []
    return EditedSet(
        shortcut,
        tuple(plain),
        tuple(edit(image, marked) for image in plain),
        tuple(members),
        tuple(edit(image, without_it) for image in members),
    )


def _marked(shortcut: Shortcut, training: ImageSet, members: Sequence[int]) -> list[int]:
    """The class's images that have the mark; all of them where the whole class has it."""
    mark = shortcut.mark
    if mark is None or mark.share == 1:
        return list(members)
    far = []
    for place in members:
        small = np.asarray(training.image(place).resize(mark.mask.shape[::-1]))
        far.append(float(np.abs(small[mark.mask].astype(float) - mark.look[mark.mask]).mean()))
    order = np.argsort(far)[: max(1, round(mark.share * len(members)))]
    return [members[place] for place in order]


def causal_test(edited: EditedSet, answers: Answers) -> EditTest:
    """Compare a model's answers for held-out images before and after the edit."""
    label = edited.shortcut.label
    before, after = answers(edited.plain) == label, answers(edited.edited) == label
    accuracy, without = None, None
    if edited.members:
        accuracy = float((answers(edited.members) == label).mean())
        without = float((answers(edited.members_without) == label).mean())
    return EditTest(
        edited.shortcut.class_name,
        len(before),
        float(before.mean()),
        float(after.mean()),
        int((after & ~before).sum()),
        int((before & ~after).sum()),
        accuracy,
        without,
    )
