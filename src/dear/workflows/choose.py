"""Which method suits a person's own images: `dear choose`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dear._io.progress import Progress
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import DataError, UsageError
from dear.methods import find_method
from dear.methods.base import Method
from dear.train.crossval import Trials, class_folds, held_out, image_folds, left_out
from dear.train.feature_cache import frozen_features
from dear.train.recipe import Recipe
from dear.train.run import Paused
from dear.workflows.balance import balanced_rows, enough_steps
from dear.workflows.options import AdaptOptions, PathLike
from dear.workflows.plan import plan_adaptation, preset_of
from dear.workflows.roles import roles_for
from dear.workflows.verdict import Candidate, Choice, recommend

METHODS = (
    "zeroshot",
    "linear-probe",
    "tip-adapter-f",
    "prolip",
    "lp-plus-plus",
    "proker",
    "clip-lora",
    "dear",
)
"""The methods that are compared: those that learn from frozen features first, slow ones last."""
FOLDS = 3
_PATIENCE = 5  # steps after which the time of a training is estimated


@dataclass(frozen=True)
class ChooseOptions:
    """How methods are compared.

    Attributes:
        methods: their names; "dear" takes its recommended preset.
        folds: parts of the images that are held out in turn.
        minutes: time for everything; a method that would take longer than what is left is not tried.
    """

    methods: tuple[str, ...] = METHODS
    folds: int = FOLDS
    minutes: float = 3.0

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
    settings: AdaptOptions | None = None,
    progress: Progress | None = None,
) -> Choice:
    """Cross-validate methods on a person's own training images and recommend one.

    Every method is trained without each part of the images in turn and answers for that part; then without
    each half of the classes, and answers for images of those. All methods are compared on the same images.

    Args:
        data: what `open_data` takes (its training split is used), or an image set.
        options: which methods, how many parts, how long.
        settings: backbone, shots, seed, template and so on; its method and preset do not count.
        progress: told which method is being tried.

    Raises:
        DataError: no class has two images, so nothing can be held out.
        DearError: anything else a user can correct, in one sentence.
    """
    options, settings = options or ChooseOptions(), settings or AdaptOptions()
    began = time.monotonic()
    deadline = began + 60 * options.minutes
    first = plan_adaptation(data, replace(settings, method="zeroshot", preset=None))
    images = first.images if first.distinct is None else first.distinct
    if not image_folds(images.labels, 2, settings.seed):
        raise DataError(
            f"{images.name}: every class has a single image, so none can be held out to compare methods; "
            "add a second image to some classes"
        )
    clip = first.method.clip
    features = frozen_features(first.method, images, first.recipe.precision, progress)
    found: list[Candidate] = []
    for number, name in enumerate(options.methods):
        if progress is not None:
            progress("methods", number, len(options.methods))
        method, recipe, preset = candidate(name, images, clip, settings)
        table = features if method.reads_feature and not recipe.augment else None
        repeated = balanced_rows if settings.balance else None
        trials = Trials(images, recipe, table, repeated)
        found.append(_tried(method, trials, preset, options.folds, deadline))
    if progress is not None:
        progress("methods", len(options.methods), len(options.methods))
    if all(one.trained is None for one in found):
        raise UsageError(f"no method could be tried in {options.minutes:g} minutes; allow more time")
    return recommend(found, time.monotonic() - began, _notes(images, options.folds, settings.seed))


def candidate(
    name: str, images: ImageSet, clip: Clip, settings: AdaptOptions
) -> tuple[Method, Recipe, str | None]:
    """A method with its recommended preset and recipe, untrained."""
    kind = find_method(name)
    preset = next(iter(kind.presets), None)
    options, changes = preset_of(replace(settings, method=name, preset=preset, options=None))
    roles = roles_for(clip, images, settings.roles)[0] if kind.uses_roles else None
    template = images.template if settings.template is None else settings.template
    method = kind(
        clip,
        images.classes,
        template=template,
        roles=roles,
        allow_other_roles=settings.allow_other_roles,
        seed=settings.seed,
        **options,
    )
    if kind.reads_feature:
        changes.setdefault("augment", False)  # the features are then computed once for all methods
    recipe = Recipe.of(kind, **{"seed": settings.seed, **changes})
    if "epochs" not in changes:
        recipe = enough_steps(recipe, len(images))
    return method, recipe, preset


@dataclass
class _Clock:
    """Watches the trainings of a method and says when all of them would take too long.

    Attributes:
        deadline: when everything must be done.
        cost: trainings on all images that the comparison of the method takes.
        share: of all images that the first training sees.
        slow: steps at the start that compute what later steps reuse (kept views).
        late: seconds that are missing; 0: none, as far as is known.
    """

    deadline: float
    cost: float
    share: float
    slow: int = 0
    late: float = 0.0
    _began: float = 0.0
    _quick: float = 0.0  # when the steps became quick
    _first: bool = True

    def __call__(self, step: int, steps: int) -> None:
        now = time.monotonic()
        if not self._first:
            return
        self._began = now if step == 1 else self._began
        self._quick = now if step == self.slow + 1 else self._quick
        if now > self.deadline:
            self.late = math.inf  # how long it would take is not known yet
        elif step == self.slow + 1 + _PATIENCE:
            self._first = False
            rate = (now - self._quick) / _PATIENCE
            one = (self._quick - self._began) + rate * (steps - self.slow)
            self.late = max(0.0, now + one / self.share * self.cost - self.deadline)


def _tried(method: Method, trials: Trials, preset: str | None, folds: int, deadline: float) -> Candidate:
    """Cross-validate one method, or say why it was not."""
    named = Candidate(method.name, method.title, preset, mode=method.modes[0], new_mode=method.modes[0])
    turns = len(class_folds(len(method.classes), trials.recipe.seed))
    began = time.monotonic()
    if began > deadline and method.trainable_parameters:
        return replace(named, skipped="no time was left")
    share, views = (folds - 1) / folds, trials.recipe.views
    slow = views * math.ceil(share * len(trials.images) / trials.recipe.batch)
    clock = _Clock(deadline, (folds - 1) + 0.25 * turns, share, slow)
    trials = replace(trials, progress=clock, stop=lambda: clock.late > 0)
    try:
        held = held_out(method, trials, folds)
        assert held is not None  # checked before any method is tried
        seconds = (time.monotonic() - began) / (folds - 1)
        new = _on_new_classes(method, trials) if method.open_classes and turns else None
    except Paused:
        if not clock.late:
            raise
        if math.isinf(clock.late):
            return replace(named, skipped="did not fit into the time")
        return replace(named, skipped=f"needs about {math.ceil(clock.late / 60)} min more")
    right = held.logits[method.modes[0]].argmax(dim=1) == held.labels
    return replace(named, trained=right[held.rows.argsort()], new=new, seconds=seconds)


def _on_new_classes(method: Method, trials: Trials) -> Tensor | None:
    """Right or wrong for images of left-out classes, answered among those, in the method's usual mode."""
    mode, parts = method.modes[0], []
    for turn in left_out(method, trials):
        first = len(turn.trained)
        of_new = turn.labels >= first
        if len(turn.new) > 1:
            answers = turn.logits[mode][of_new, first:].argmax(dim=1)
            parts.append((turn.rows[of_new], answers == turn.labels[of_new] - first))
    if not parts:
        return None
    rows, right = torch.cat([r for r, _ in parts]), torch.cat([right for _, right in parts])
    return right[rows.argsort()]


def _notes(images: ImageSet, folds: int, seed: int) -> list[str]:
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
    return notes
