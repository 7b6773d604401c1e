"""Which method suits a person's own images: `dear choose`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dear._io.files import PathLike
from dear._io.progress import Progress
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import DataError, UsageError
from dear.methods import find_method
from dear.runs.spec import Spec
from dear.train.crossval import class_folds, image_folds
from dear.train.fit import trials_of
from dear.train.frozen import feature_stages
from dear.train.prepare import prepare
from dear.workflows.trying import Attempt, try_all
from dear.workflows.verdict import Candidate, Choice, recommend

METHODS = (
    "zeroshot",
    "linear-probe",
    "tip-adapter-f",
    "prolip",
    "lp-plus-plus",
    "proker",
    "mmrl",
    "dear",
    "clip-lora",
)
"""The methods that are compared: those that learn from frozen features first, slow ones last."""
FOLDS = 3


@dataclass(frozen=True)
class ChooseOptions:
    """How methods are compared.

    Attributes:
        methods: their names; "dear" takes its recommended preset.
        folds: parts of the images that are held out in turn.
        minutes: time for everything. Methods that train inside the towers share what the others leave: their
            trainings are shortened to fit, and a method that would hardly train at all is not tried.
    """

    methods: tuple[str, ...] = METHODS
    folds: int = FOLDS
    minutes: float = 2.0

    def __post_init__(self) -> None:
        if not self.methods:
            raise UsageError("name at least one method to compare")
        for name in self.methods:
            find_method(name)
        if self.folds < 2:
            raise UsageError(f"folds = {self.folds}: hold out at least 2 parts in turn")
        if not (self.minutes > 0 and math.isfinite(self.minutes)):
            raise UsageError(f"minutes = {self.minutes}: give a positive time")


def choose(
    data: PathLike | ImageSet,
    options: ChooseOptions | None = None,
    spec: Spec | None = None,
    *,
    clip: Clip | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Choice:
    """Cross-validate methods on a person's own training images and recommend one.

    Every method is trained without each part of the images in turn and answers for that part; then without
    each half of the classes, and answers for images of those. All methods are compared on the same images.

    Args:
        data: what `open_data` takes (its training split is used), or an image set.
        options: which methods, how many parts, how long.
        spec: backbone, shots, seed, template and so on; its method, preset and options do not count.
        clip: a loaded backbone, instead of that of `spec`.
        device: "auto", "cpu", "cuda", ...
        progress: told which method is being tried.

    Raises:
        DataError: no class has two images, so nothing can be held out.
        DearError: anything else a user can correct, in one sentence.
    """
    options, began = options or ChooseOptions(), time.monotonic()
    deadline = began + 60 * options.minutes
    given = data if isinstance(data, ImageSet) else None
    spec = (spec or Spec()).changed(preset=None, options=None)
    spec = spec if given is not None else spec.changed(data=data)
    first = prepare(spec.changed(method="zeroshot"), given, clip=clip, device=device)
    images, clip = first.images, first.method.clip
    if not image_folds(images.labels, 2, spec.seed):
        raise DataError(
            f"{images.name}: every class has a single image, so none can be held out to compare methods; "
            "add a second image to some classes"
        )
    attempts = []
    for name in options.methods:
        job = prepare(spec.changed(method=name), images, drawn=True, clip=clip)
        method = job.method
        trials = trials_of(job, feature_stages(method, images, job.recipe, progress))
        named = Candidate(name, method.title, job.spec.preset, mode=method.modes[0], new_mode=method.modes[0])
        attempts.append(Attempt(method, trials, named, options.folds))
    tried = try_all(attempts, deadline, progress)
    if all(one.trained is None for one in tried):
        raise UsageError(f"no method could be tried in {options.minutes:g} minutes; allow more time")
    return recommend(tried, time.monotonic() - began, _notes(images, options.folds, spec.seed, tried))


def _notes(images: ImageSet, folds: int, seed: int, tried: Sequence[Candidate]) -> list[str]:
    """What the reader should know about the data."""
    counts = torch.bincount(images.labels, minlength=len(images.classes))
    notes = [
        f"{len(images)} images of {len(images.classes)} classes; each part of {folds} was held out in turn"
    ]
    single: Sequence[str] = [n for n, c in zip(images.classes, counts.tolist(), strict=True) if c == 1]
    if single:
        notes.append(
            f"{len(single)} classes have a single image, which is never held out: the figures say nothing "
            f"about them ({', '.join(single[:3])}{', …' if len(single) > 3 else ''})"
        )
    if int(counts.max()) >= 2 * int(counts.min()):
        notes.append(
            f"classes have {int(counts.min())} to {int(counts.max())} images; rare ones are repeated in "
            "training, and the accuracy counts every image alike"
        )
    if not class_folds(len(images.classes), seed) or len(images.classes) < 4:
        notes.append(
            f"with {len(images.classes)} classes none can be left out, so accuracy on new classes is not "
            "estimated; four are needed"
        )
    if len(images) < 30:
        notes.append(f"{len(images)} images are few: only large differences can be seen")
    untried = [one.title for one in tried if one.skipped is not None]
    if untried:
        notes.append(
            f"{_listed(untried)}: not tried for lack of time; methods that train inside the towers are often "
            "the best, which more minutes would show"
        )
    short = [one.title for one in tried if one.shortened]
    if short:
        notes.append(
            f"{_listed(short)} took fewer steps than a training has, to fit into the time; in full they "
            "may do better, which more minutes would show"
        )
    return notes


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
