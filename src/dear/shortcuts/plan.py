"""Removing a property of images (brightness, a frame, a mark) from what a training learns.

Three ways: edited copies of the training images join the training; the directions along which edits move the
feature are removed from it; or what those heads add that react to the edits. Which one is best is decided on
the training images (`dear.shortcuts.trials`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dear.clip.model import Clip
from dear.data.folds import Places
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.heads.ablate import Collected, collect
from dear.shortcuts.directions import DIRECTIONS
from dear.shortcuts.edited_images import EditedImages
from dear.shortcuts.edits import KINDS
from dear.shortcuts.find import Shortcut, find_shortcuts
from dear.shortcuts.properties import measure
from dear.shortcuts.removal import Repair
from dear.shortcuts.trials import (
    WAYS,
    EditChoice,
    EditedFeatures,
    choose,
    directions_removed,
    heads_removed,
)
from dear.shortcuts.without import Without
from dear.utils.progress import Progress, silent

GAIN = 0.02  #: of the answers, to count as better
MOST = 400  #: training images that are edited to find directions and heads, and to choose


@dataclass(frozen=True, eq=False)
class EditPlan:
    """How properties are removed from a training."""

    kinds: tuple[str, ...]
    way: str
    #: findings of these kinds in the training images
    shortcuts: tuple[Shortcut, ...]
    #: what was tried on held-out training images; None: the way was given
    choice: EditChoice | None = None
    #: edited copies, in blocks as long as the training set
    copies: tuple[EditedImages, ...] = ()
    #: what is removed from the feature; None: copies are trained on
    repair: Repair | None = None
    #: contributions of training images in the plain backbone
    images: Collected | None = field(default=None, repr=False)

    @property
    def title(self) -> str:
        """A few words for people."""
        if self.repair is not None:
            return self.repair.title
        return f"{', '.join(self.kinds)} by edited copies ({len(self.copies)} per image)"

    @property
    def notices(self) -> tuple[str, ...]:
        """What to know, one sentence each."""
        notices = []
        for kind in self.kinds:
            if not any(one.kind == kind for one in self.shortcuts):
                notices.append(
                    f"No class of the training images stands out by {kind}; edits of it are random."
                )
        return (*notices, *(() if self.choice is None else (self._verdict(self.choice),)))

    def _verdict(self, choice: EditChoice) -> str:
        """What the chosen way did on held-out training images."""
        names, trials = ", ".join(self.kinds), choice.trials
        before, after = trials["nothing"], trials[choice.way]
        what = "brings answers to the class" if self.shortcuts else "makes answers wrong"
        moved = f"on held-out training images an edit {what} in {before.moved:.1%}"
        if before.moved < GAIN:
            return f"A linear classifier hardly uses {names}: {moved}."
        figures = f"{moved}, by {choice.way} in {after.moved:.1%}"
        if before.moved - after.moved < GAIN:
            return f"No way helps much against {names}: {figures}."
        random = choice.random
        if random is None:
            return f"Chosen for {names}: {choice.way}; {figures}."
        drawn = f"as many random {choice.way} {random.moved:.1%}"
        if before.moved - random.moved > (before.moved - after.moved) / 2:
            return f"Removing {names} does little more than chance: {figures}, {drawn}."
        return f"Chosen for {names}: {choice.way}; {figures}, {drawn}."

    def facts(self) -> dict[str, Any]:
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
    """Kinds of properties, and the rest: concepts."""
    kinds = tuple(name for name in without.concepts if name in KINDS)
    concepts = tuple(name for name in without.concepts if name not in KINDS)
    if not concepts:
        return kinds, None
    if without.way in ("directions", "copies"):
        raise UsageError(
            f"{concepts[0]} is a concept: {without.way} removes properties of images, {', '.join(KINDS)}"
        )
    return kinds, replace(without, concepts=concepts)


def plan_edits(
    clip: Clip,
    images: ImageSet,
    kinds: Sequence[str],
    way: str = "auto",
    seed: int = 1,
    progress: Progress | None = None,
    units: Places | None = None,
) -> EditPlan:
    """Decide how to remove properties from a training on these images; `clip` is the plain backbone.

    `units` [n]: copies of an image have the same; None: images with equal features are copies.
    """
    if way not in ("auto", *WAYS):
        raise UsageError(
            f"{kinds[0]} is a property of images; it is removed by auto, {', '.join(WAYS[:-1])} or "
            f"{WAYS[-1]}, not by {way}"
        )
    progress = progress or silent
    candidates = find_shortcuts(measure(images, progress), images.labels.tolist(), images.classes)
    shortcuts = tuple(one for one in candidates if one.kind in kinds)
    copies = [EditedImages(images, kind, seed=seed) for kind in kinds]
    copies += [EditedImages(images, one.kind, one, seed=seed) for one in shortcuts]
    plan = EditPlan(tuple(kinds), way, shortcuts)
    if way == "copies":
        return replace(plan, copies=tuple(copies))
    step = -(-len(images) // MOST)
    places = range(0, len(images), step)
    some, some_copies = images.subset(places), [each.subset(places) for each in copies]
    seen = edited_features(clip, some, some_copies, progress)
    seen = replace(seen, units=None if units is None else units[::step])
    choice = choose(seen, kinds) if way == "auto" else None
    return _with_way(replace(plan, choice=choice, images=seen.original), seen, tuple(copies))


def edited_features(
    clip: Clip, images: ImageSet, copies: Sequence[EditedImages], progress: Progress = silent
) -> EditedFeatures:
    """Features of images and of their edited copies by the plain backbone."""
    layers, total = clip.config.vision.last_third, len(images) * (1 + len(copies))

    def run(number: int, each: ImageSet) -> Collected:
        start = number * len(images)
        return collect(
            clip, each, layers, progress=lambda done: progress("edited images", start + done, total)
        )

    original, *edited = (run(number, each) for number, each in enumerate((images, *copies)))
    toward = tuple(-1 if each.shortcut is None else each.shortcut.label for each in copies)
    return EditedFeatures(original, tuple(edited), images.labels.to(torch.int64), toward)


def _with_way(plan: EditPlan, seen: EditedFeatures, copies: tuple[EditedImages, ...]) -> EditPlan:
    """The plan with what its way needs."""
    way = plan.way if plan.choice is None else plan.choice.way
    if way == "copies":
        return replace(plan, way=way, copies=copies)
    if way == "heads":
        return replace(plan, way=way, repair=heads_removed(seen, plan.kinds))
    count = DIRECTIONS if plan.choice is None else plan.choice.directions
    return replace(plan, way=way, repair=directions_removed(seen, plan.kinds, count))
