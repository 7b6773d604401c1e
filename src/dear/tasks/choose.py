"""Which method suits a person's own images (`dear choose`): cross-validation of a few, and a table."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor

from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import DataError, UsageError
from dear.heads.roles import RoleMap
from dear.methods import find_method
from dear.runs.evaluate import share_interval
from dear.runs.spec import Spec
from dear.train.crossval import HeldOut, Trials, classes_held_out, held_out, image_folds
from dear.train.fit import trials_of
from dear.train.frozen import FrozenViews, reads_features, shared_views
from dear.train.run import Paused
from dear.train.setup.estimate import estimate
from dear.train.setup.notices import duplicate_notices
from dear.train.setup.prepare import Job, prepare
from dear.utils.files import PathLike
from dear.utils.progress import Progress, silent
from dear.utils.text import duration

METHODS = ("zeroshot", "linear-probe", "tip-adapter-f", "proker", "lp-plus-plus", "dear", "mmrl")
"""The methods that are compared: those that learn from frozen features first, slow ones last."""
FOLDS = 3
DOUBT = 0.1  #: probability of chance above which two methods count as equally good
WORTH = 0.01  #: accuracy that a slower method must win to be recommended


@dataclass(frozen=True)
class Candidate:
    """How a method did in cross-validation."""

    method: str
    title: str
    preset: str | None = None
    trained: Tensor | None = None  #: whether each held-out image was answered rightly, [n]
    new: Tensor | None = None  #: the same for images of held-out classes; None: it cannot name new classes
    seconds: float = 0.0  #: that trying it took, without image features that other methods share
    skipped: str | None = None  #: why it was not tried

    def row(self) -> dict[str, Any]:
        """Plain values for a table or JSON: shares of 1, with 90% confidence intervals."""
        return {
            "method": self.method,
            "title": self.title,
            "preset": self.preset,
            "trained": _figures(self.trained),
            "new": _figures(self.new),
            "seconds": round(self.seconds, 1),
            "skipped": self.skipped,
        }


@dataclass(frozen=True)
class Recommendation:
    """What `dear choose` found."""

    candidates: tuple[Candidate, ...]
    pick: Candidate  #: for the classes at hand: the most accurate, or a quicker one that is as good
    pick_for_new: Candidate | None  #: the same for classes added later; None: not measured
    notes: tuple[str, ...]
    seconds: float

    @property
    def sentence(self) -> str:
        """The recommendation."""
        alike = [one.title for one in self.candidates if one is not self.pick and _as_good(one, self.pick)]
        said = f"Take {self.pick.title}."
        if alike:
            said += f" On so few images it is not significantly better than {_listed(alike)}."
        if self.pick_for_new is not None and self.pick_for_new is not self.pick:
            said += f" Take {self.pick_for_new.title} if you will add classes later."
        return said

    def report(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "pick": self.pick.method,
            "preset": self.pick.preset,
            "pick_for_new_classes": None if self.pick_for_new is None else self.pick_for_new.method,
            "recommendation": self.sentence,
            "notes": list(self.notes),
            "methods": [one.row() for one in self.candidates],
            "seconds": round(self.seconds, 1),
        }


def choose(
    data: PathLike | ImageSet,
    methods: Sequence[str] = METHODS,
    spec: Spec | None = None,
    *,
    folds: int = FOLDS,
    minutes: float = 2.0,
    clip: Clip | None = None,
    roles: RoleMap | None = None,
    device: str = "auto",
    progress: Progress = silent,
) -> Recommendation:
    """Cross-validate methods on a person's own training images and recommend one.

    Every method is trained without each part of the images in turn and answers for that part; then without
    each half of the classes, and answers for images of those. All methods answer for the same images.

    Args:
        data: what `open_data` takes (its training split is used), or an image set.
        methods: to compare, each with its recommended preset.
        spec: backbone, shots, seed, template and so on; its method, preset and options do not count.
        folds: parts of the images that are held out in turn.
        minutes: for everything; methods that cannot be finished in it are not counted.
        clip: a loaded backbone, instead of that of `spec`.
        roles: role map; None: the backbone's own, or found on the images.
        device: "auto", "cpu", "cuda", ...
        progress: called with the method that is tried, methods done, methods in all.

    Raises:
        DataError: no class has two images, so nothing can be held out.
        DearError: anything else a user can correct, in one sentence.
    """
    began, kinds = time.monotonic(), [find_method(name) for name in methods]
    if not kinds:
        raise UsageError("name at least one method to compare")
    if folds < 2:
        raise UsageError(f"folds = {folds}: hold out at least 2 parts in turn")
    if not (minutes > 0 and math.isfinite(minutes)):
        raise UsageError(f"minutes = {minutes}: give a positive time")
    given = data if isinstance(data, ImageSet) else None
    spec = (spec or Spec()).changed(
        preset=None, options=None, **({} if given is not None else {"data": data})
    )
    first = prepare(spec.changed(method="zeroshot", calibrate=True), given, clip=clip, device=device)
    images, clip = first.images, first.method.clip
    if not image_folds(images.labels, 2, spec.seed, first.duplicates):
        raise DataError(
            f"{images.name}: every class has a single image (copies are not counted), so none can be held "
            "out to compare methods; add a second image to some classes"
        )
    tried, cached = list[Candidate](), list[FrozenViews | None]()
    for kind in kinds:
        progress(kind.name, len(tried), len(kinds))
        own = roles if kind.uses_roles else None
        job = prepare(
            spec.changed(method=kind.name),
            images,
            drawn=True,
            clip=clip,
            roles=own,
            duplicates=first.duplicates,
        )
        tried.append(_try(job, folds, began + 60 * minutes, cached))
    progress(kinds[-1].name, len(kinds), len(kinds))
    done = [one for one in tried if one.trained is not None]
    if not done:
        reasons = "; ".join(f"{one.title} {one.skipped}" for one in tried)
        raise UsageError(f"no method could be tried in {minutes:g} minutes ({reasons}); allow more time")
    open_ones = [one for one in done if one.new is not None]
    return Recommendation(
        tuple(tried),
        _best(done, "trained"),
        _best(open_ones, "new") if open_ones else None,
        tuple(_notes(first, folds, tried)),
        time.monotonic() - began,
    )


def _try(job: Job, folds: int, deadline: float, cached: list[FrozenViews | None]) -> Candidate:
    """Cross-validate one method, unless that would take longer than is left."""
    method, began = job.method, time.monotonic()
    found = Candidate(job.spec.method, method.title, job.spec.preset)
    left, expected = max(0.0, deadline - began), estimate(job)
    needed = 0.0 if expected is None else expected.training * (folds - 1 + 0.5 * method.open_classes)
    if needed > left:
        return replace(found, skipped=f"needs about {duration(needed)}, {duration(left)} were left")
    if not left:
        return replace(found, skipped="no time was left")
    views = _views(job, cached)
    if reads_features(method, job.recipe):
        began = time.monotonic()  # others use the same features
    try:
        trials = trials_of(job, views, stop=lambda: time.monotonic() > deadline)
        held = held_out(method, trials, folds)
        assert held is not None  # some class has two images
        new = _on_new(job, trials) if method.open_classes else None
    except Paused:
        return replace(found, skipped="was not finished in time")
    return replace(found, trained=_right(held, method.modes[0]), new=new, seconds=time.monotonic() - began)


def _views(job: Job, cached: list[FrozenViews | None]) -> FrozenViews | None:
    """What the frozen backbone makes of the images; methods that read the frozen feature share it."""
    if not reads_features(job.method, job.recipe):
        return shared_views(job.method, job.images, job.recipe)
    if not cached:
        cached.append(shared_views(job.method, job.images, job.recipe))
    return cached[0]


def _on_new(job: Job, trials: Trials) -> Tensor | None:
    """Right or wrong on images of held-out classes, answered among those; None: too few classes."""
    mode, parts = job.method.modes[0], []
    for turn in classes_held_out(job.method, trials):
        first = len(turn.trained)
        own = turn.labels >= first
        if len(turn.new) > 1:
            parts.append(turn.logits[mode][own, first:].argmax(dim=1) == turn.labels[own] - first)
    return torch.cat(parts) if parts else None


def _right(held: HeldOut, mode: str) -> Tensor:
    order = held.rows.argsort()
    return (held.logits[mode].argmax(dim=1) == held.labels)[order]


def _figures(right: Tensor | None) -> dict[str, float | int] | None:
    """Accuracy with its 90% confidence interval."""
    if right is None:
        return None
    hits, images = int(right.sum()), len(right)
    low, high = share_interval(hits, images)
    return {"accuracy": hits / images, "low": low, "high": high, "images": images}


def _best(candidates: Sequence[Candidate], column: str) -> Candidate:
    """The quickest of those as good as the most accurate: training that gains nothing is not recommended."""
    accuracy = {id(one): float(getattr(one, column).double().mean()) for one in candidates}
    best = max(candidates, key=lambda one: (accuracy[id(one)], -one.seconds))
    worth = max(WORTH, 1 / len(getattr(best, column)))  # one image is no gain
    near = [one for one in candidates if accuracy[id(one)] >= accuracy[id(best)] - worth]
    return min(near, key=lambda one: one.seconds)


def _as_good(one: Candidate, best: Candidate) -> bool:
    """Whether chance explains the difference on the same images (McNemar's exact test)."""
    if one.trained is None or best.trained is None:
        return False
    wins, losses = int((best.trained & ~one.trained).sum()), int((~best.trained & one.trained).sum())
    return wins + losses == 0 or binomtest(wins, wins + losses).pvalue >= DOUBT


def _notes(job: Job, folds: int, tried: Sequence[Candidate]) -> list[str]:
    """What the reader should know about the data."""
    images = job.images
    counts = torch.bincount(images.labels, minlength=len(images.classes))
    notes = [
        f"{len(images)} images of {len(images.classes)} classes; each part of {folds} was held out in turn"
    ]
    notes += [] if job.duplicates is None else duplicate_notices(job.duplicates)
    single = [name for name, count in zip(images.classes, counts.tolist(), strict=True) if count == 1]
    if single:
        notes.append(
            f"{len(single)} classes have a single image, which is never held out: the figures say nothing "
            f"about them ({', '.join(single[:3])}{', …' if len(single) > 3 else ''})"
        )
    if len(images.classes) < 4:
        notes.append(
            f"with {len(images.classes)} classes none can be held out, so accuracy on new classes is not "
            "estimated; four are needed"
        )
    untried = [one.title for one in tried if one.skipped is not None]
    if untried:
        notes.append(f"{_listed(untried)}: not tried for lack of time; more minutes may show a better method")
    return notes


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
