"""Does a model use a shortcut? Held-out images of other classes are given it, and the answers counted."""

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
"""Labels that a model gives to images."""

RELIES = 0.03  #: share of answers that must move to the class
IMAGES = 120  #: of other classes that are edited at most


@dataclass(frozen=True)
class Causal:
    """Answers with a shortcut given to others and, where an edit can do that, taken from the class."""

    class_name: str
    images: int  #: held-out images of other classes that were tested
    plain: float  #: share of them that the model calls by the class, as they are and edited
    edited: float
    moved_in: int  #: answers that moved to the class and away from it
    moved_out: int
    #: share of right answers on the class's own held-out images, as they are and without it; None: not tested
    own: float | None = None
    own_without: float | None = None

    @property
    def extra(self) -> float:
        """Share of answers that the shortcut brings to the class."""
        return self.edited - self.plain

    @property
    def relies(self) -> bool:
        """Whether more answers move to the class than chance and rounding explain (two standard errors)."""
        surplus = self.moved_in - self.moved_out
        return self.extra >= RELIES and surplus > 2 * np.sqrt(self.moved_in + self.moved_out)

    @property
    def sentence(self) -> str:
        """The result for people."""
        found = f"{self.plain:.1%} of {self.images} held-out images of other classes are called"
        moved = f"{found} {self.class_name}; given what its images have, {self.edited:.1%}"
        if self.own is None or self.own_without is None:
            return f"{moved}."
        own = f"right answers on held-out {self.class_name} go from {self.own:.1%} to"
        return f"{moved}. Without it {own} {self.own_without:.1%}."

    def report(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "class": self.class_name,
            "images": self.images,
            "called_by_class": self.plain,
            "called_by_class_edited": self.edited,
            "relies": bool(self.relies),
            "class_accuracy": self.own,
            "class_accuracy_without": self.own_without,
        }


@dataclass(frozen=True, eq=False)
class EditedSet:
    """Held-out images as they are and edited, so that several models can be tested on the same."""

    shortcut: Shortcut
    plain: tuple[Image.Image, ...]
    edited: tuple[Image.Image, ...]
    own: tuple[Image.Image, ...]
    own_without: tuple[Image.Image, ...]


def edited_set(
    shortcut: Shortcut, held_out: ImageSet, training: ImageSet, images: int = IMAGES, seed: int = 1
) -> EditedSet:
    """The images that `causal_test` asks about: at most `images` held-out ones of other classes.

    Donors come from the training images; labels of both sets count into the same classes.
    """
    if not shortcut.kind:
        raise UsageError(f"{shortcut.name} is a fact of files that no model sees; there is nothing to edit")
    rng = random.Random(seed)
    (own, others), (with_it, without_it) = (
        [(mine == wanted).nonzero()[:, 0].tolist() for wanted in (True, False)]
        for mine in (held_out.labels == shortcut.label, training.labels == shortcut.label)
    )
    if not others or not with_it:
        raise UsageError(
            f"{held_out.name}: there are no held-out images of classes beside {shortcut.class_name}"
        )
    chosen = rng.sample(others, min(images, len(others)))
    mask = None if shortcut.mark is None else shortcut.mark.mask
    marked = _marked(shortcut, training, with_it)

    def given(image: Image.Image, donors: Sequence[int]) -> Image.Image:
        return transfer(shortcut.kind, image, training.image(rng.choice(donors)), mask, shortcut.name)

    plain = [held_out.image(place) for place in chosen]
    mine = [held_out.image(place) for place in own] if can_remove(shortcut.kind) and without_it else []
    return EditedSet(
        shortcut,
        tuple(plain),
        tuple(given(image, marked) for image in plain),
        tuple(mine),
        tuple(given(image, without_it) for image in mine),
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


def causal_test(edited: EditedSet, answers: Answers) -> Causal:
    """What a model answers for held-out images as they are and edited."""
    label = edited.shortcut.label
    before, after = answers(edited.plain) == label, answers(edited.edited) == label
    own, without = None, None
    if edited.own:
        own = float((answers(edited.own) == label).mean())
        without = float((answers(edited.own_without) == label).mean())
    return Causal(
        edited.shortcut.class_name,
        len(before),
        float(before.mean()),
        float(after.mean()),
        int((after & ~before).sum()),
        int((before & ~after).sum()),
        own,
        without,
    )
