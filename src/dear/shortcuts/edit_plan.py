"""Removing a property of images (brightness, a frame, a mark) from what a training learns.

Three ways: train on edited copies in addition to the training images; remove the directions in which edits
move the feature; or remove the contributions of the heads that react to the edits. The best one is chosen on
the training images (`dear.shortcuts.edit_trials`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dear.clip.model import Clip
from dear.data.folds import IntArray
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.heads.collect import HeadContributions, collect_contributions
from dear.shortcuts.directions import DIRECTIONS
from dear.shortcuts.edit_trials import (
    WAYS,
    EditChoice,
    EditedFeatures,
    choose_edit_removal,
    remove_directions,
    remove_edit_heads,
)
from dear.shortcuts.edited_images import EditedImages
from dear.shortcuts.edits import KINDS
from dear.shortcuts.find import Shortcut, find_shortcuts
from dear.shortcuts.properties import measure_properties
from dear.shortcuts.removal import Removal
from dear.shortcuts.without import Without
from dear.utils.notices import note
from dear.utils.progress import Progress, silent

GAIN = 0.02  #: fraction of the predictions that an improvement must reach
MAX_IMAGES = 400  #: training images that are edited to find directions and heads, and to choose


@dataclass(frozen=True, eq=False)
class EditPlan:
    """How properties are removed from a training."""

    kinds: tuple[str, ...]
    way: str
    #: findings of these kinds in the training images
    shortcuts: tuple[Shortcut, ...]
    #: results on held-out training images; None: the user named the way, or no image can be held out
    choice: EditChoice | None = None
    #: edited copies, in blocks as long as the training set
    copies: tuple[EditedImages, ...] = ()
    #: the removal from the feature; None: copies are used instead
    removal: Removal | None = None
    #: contributions of training images in the plain backbone
    images: HeadContributions | None = field(default=None, repr=False)

    @property
    def title(self) -> str:
        """Short description."""
        if self.removal is not None:
            return self.removal.title
        return f"{', '.join(self.kinds)} by edited copies ({len(self.copies)} per image)"

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes for the user, one sentence each."""
        notices = []
        for kind in self.kinds:
            if not any(shortcut.kind == kind for shortcut in self.shortcuts):
                notices.append(f"No class of the training images differs in {kind}; its edits are random.")
        return (*notices, *(() if self.choice is None else (self._verdict(self.choice),)))

    def _verdict(self, choice: EditChoice) -> str:
        """The effect of the chosen way on held-out training images."""
        names, trials = ", ".join(self.kinds), choice.trials
        before, after = trials["nothing"], trials[choice.way]
        verb, end = ("moves", "to the class") if self.shortcuts else ("makes", "wrong")
        moved = f"on held-out training images an edit {verb} {before.moved:.1%} of the predictions {end}"
        if before.moved < GAIN:
            return f"A linear classifier hardly uses {names}: {moved}."
        figures = f"{moved}; after removal by {choice.way}: {after.moved:.1%}"
        if before.moved - after.moved < GAIN:
            return f"No way of removal helps much against {names}: {figures}."
        random = choice.random
        if random is None:
            return f"Removal of {names} by {choice.way}: {figures}."
        control = f"by as many random {choice.way}: {random.moved:.1%}"
        if before.moved - random.moved > (before.moved - after.moved) / 2:
            return f"Removing {names} does little more than chance: {figures}, {control}."
        return f"Removal of {names} by {choice.way}: {figures}, {control}."

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        if self.choice is None:
            return {"way": self.way}
        trials = dict(self.choice.trials)
        if self.choice.random is not None:
            trials["random"] = self.choice.random
        figures = {
            way: {"accuracy": round(t.accuracy, 4), "moved": round(t.moved, 4)} for way, t in trials.items()
        }
        return {"way": self.way, "held_out_training_images": figures}


def split_without(without: Without) -> tuple[tuple[str, ...], Without | None]:
    """The names in `without` that are properties of images, and a `Without` of the concepts, if any."""
    kinds = tuple(name for name in without.concepts if name in KINDS)
    concepts = tuple(name for name in without.concepts if name not in KINDS)
    if not concepts:
        return kinds, None
    if without.way in ("directions", "copies"):
        raise UsageError(
            f"way {without.way!r} needs properties of images ({', '.join(KINDS)}), got the concept "
            f"{concepts[0]}; use auto, words, heads, or examples"
        )
    return kinds, replace(without, concepts=concepts)


def plan_edits(
    clip: Clip,
    images: ImageSet,
    kinds: Sequence[str],
    way: str = "auto",
    seed: int = 1,
    progress: Progress | None = None,
    units: IntArray | None = None,
) -> EditPlan:
    """Plan how to remove properties from a training on these images; `clip` is the plain backbone.

    `units` [n] are equal for copies of an image; None: images with equal features are copies.
    """
    if way not in ("auto", *WAYS):
        raise UsageError(
            f"way must be one of auto, {', '.join(WAYS)} for {kinds[0]}, a property of images, got {way!r}"
        )
    progress = progress or silent
    candidates = find_shortcuts(measure_properties(images, progress), images.labels.tolist(), images.classes)
    shortcuts = tuple(shortcut for shortcut in candidates if shortcut.kind in kinds)
    copies = [EditedImages(images, kind, seed=seed) for kind in kinds]
    copies += [EditedImages(images, shortcut.kind, shortcut, seed=seed) for shortcut in shortcuts]
    plan = EditPlan(tuple(kinds), way, shortcuts)
    if way == "copies":
        return replace(plan, copies=tuple(copies))
    step = -(-len(images) // MAX_IMAGES)
    rows = range(0, len(images), step)
    edited = edited_features(clip, images.subset(rows), [part.subset(rows) for part in copies], progress)
    edited = replace(edited, units=None if units is None else units[::step])
    choice = choose_edit_removal(edited, kinds) if way == "auto" else None
    if way == "auto" and choice is None:
        way = WAYS[0]
        note(f"{images.name}: one image per class is too few to compare ways of removal; using {way}")
    plan = replace(plan, way=way, choice=choice, images=edited.original)
    return _complete_plan(plan, edited, tuple(copies))


def edited_features(
    clip: Clip, images: ImageSet, copies: Sequence[EditedImages], progress: Progress = silent
) -> EditedFeatures:
    """Features of images and of their edited copies in the plain backbone."""
    layers, total = clip.config.vision.last_third, len(images) * (1 + len(copies))

    def run(number: int, part: ImageSet) -> HeadContributions:
        start = number * len(images)
        return collect_contributions(
            clip, part, layers, progress=lambda done: progress("edited images", start + done, total)
        )

    original, *edited = (run(number, part) for number, part in enumerate((images, *copies)))
    toward = tuple(-1 if part.shortcut is None else part.shortcut.label for part in copies)
    return EditedFeatures(original, tuple(edited), images.labels.to(torch.int64), toward)


def _complete_plan(plan: EditPlan, edited: EditedFeatures, copies: tuple[EditedImages, ...]) -> EditPlan:
    """The plan with its way, and the copies or the removal of that way."""
    way = plan.way if plan.choice is None else plan.choice.way
    if way == "copies":
        return replace(plan, way=way, copies=copies)
    if way == "heads":
        return replace(plan, way=way, removal=remove_edit_heads(edited, plan.kinds))
    count = DIRECTIONS if plan.choice is None else plan.choice.directions
    return replace(plan, way=way, removal=remove_directions(edited, plan.kinds, count))
