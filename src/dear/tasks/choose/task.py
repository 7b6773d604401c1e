"""Which method suits a dataset: cross-validation of a few methods (`dear choose`, `dear.choose`)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.data.images import ImageSet, require_one_label
from dear.data.inputs import is_frame
from dear.data.open import open_data
from dear.data.texts import read_texts
from dear.errors import DataError, UsageError
from dear.heads.roles import RoleMap
from dear.methods import find_method
from dear.runs.folder import check_folder
from dear.runs.spec import Spec
from dear.tasks.adapt import adapt as train
from dear.tasks.choose.result import Candidate, Choice, join_names
from dear.train.crossval import HeldOut, Trials, image_folds, predict_held_out, predict_held_out_classes
from dear.train.fit import trials_of
from dear.train.frozen import FrozenViews, reads_features, shared_views
from dear.train.run import Paused
from dear.train.setup.estimate import estimate
from dear.train.setup.notices import duplicate_notices
from dear.train.setup.prepare import Job, prepare
from dear.utils.files import PathLike
from dear.utils.pairs import split_names
from dear.utils.progress import Progress, silent
from dear.utils.text import format_duration

METHODS = ("zeroshot", "linear-probe", "tip-adapter-f", "proker", "lp-plus-plus", "dear", "mmrl")
"""The methods that are compared: those that learn from frozen features first, slow ones last."""
QUICKEST = ("zeroshot", "tip-adapter", "proker", "lp-plus-plus", "linear-probe", "tip-adapter-f")
"""Methods that take seconds, the quickest first: from run to run their times vary more than they differ."""
FOLDS = 3
WORTH = 0.01  #: accuracy that a slower method must win to be recommended


def choose(
    data: PathLike | ImageSet,
    *,
    backbone: PathLike | Clip = "mini",
    methods: str | Sequence[str] | None = None,
    shots: int = 16,
    seed: int = 1,
    folds: int = FOLDS,
    minutes: float = 2.0,
    adapt: bool = False,
    out: PathLike | None = None,
    unreadable: str = "stop",
    data_root: PathLike | None = None,
    template: str | None = None,
    texts: PathLike | Mapping[str, Any] | None = None,
    device: str = "auto",
    roles: PathLike | RoleMap | None = None,
    recipe: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> Choice:
    """Cross-validate methods on labeled training images and recommend one.

    Every method is trained without each fold of the images in turn and answers for that fold; then without
    each half of the classes, and answers for images of those. All methods answer for the same images.

    Args:
        data: what `open_data` takes (its training split is used), or an image set.
        backbone: what `load` takes, or a loaded backbone.
        methods: to compare, each with its recommended preset; None: seven common ones.
        shots: images per class to compare on; 0: all.
        seed: of the draw of images, of folds and of training.
        folds: parts of the images that are held out in turn.
        minutes: for everything; methods that cannot finish in that time are skipped.
        adapt: then train the recommended method on all training images.
        out: run folder of that training; None keeps it in memory.
        unreadable: "stop" refuses images that cannot be read, "skip" leaves them out.
        data_root: folder of the benchmarks, for the name of a benchmark.
        template: prompt with `{}`; None: the dataset's.
        texts: several texts per class, averaged; see `dear.adapt`.
        device: "auto", "cpu", "cuda", …
        roles: role map or its file; None: the backbone's, or discovered on the images.
        recipe: values of the training recipe by name, for all methods.
        progress: called with the method that is compared, methods done, methods in all.

    Raises:
        DataError: no class has two images, so nothing can be held out.
        RunError: `out` cannot be written; checked before any work.
        DearError: anything else a user can correct.

    Example:
        >>> choose("photos/", backbone="openai/clip-vit-base-patch16").to_frame()    # doctest: +SKIP
    """
    began = time.monotonic()
    names = split_names(methods) if isinstance(methods, str) else METHODS if methods is None else methods
    kinds = [find_method(name) for name in names]
    if not kinds:
        raise UsageError("methods must name at least 1 method, got none")
    if folds < 2:
        raise UsageError(f"folds must be at least 2, got {folds}")
    if not (minutes > 0 and math.isfinite(minutes)):
        raise UsageError(f"minutes must be a positive number, got {minutes}")
    if out is not None and not adapt:
        raise UsageError(
            "out needs adapt, which trains the recommended method; set adapt or leave out out",
            hint="choose-adapt",
        )
    if out is not None:
        check_folder(out, resume=False)
    if is_frame(data):
        data = open_data(data, "train", root=data_root, template=template)
    images = data if isinstance(data, ImageSet) else None
    spec = Spec().changed(
        data=None if isinstance(data, ImageSet) else data,
        backbone=None if isinstance(backbone, Clip) else backbone,
        shots=shots,
        seed=seed,
        template=template,
        texts=None if texts is None else read_texts(texts),
        root=data_root,
        unreadable=unreadable,
        recipe=recipe,
        roles=None if isinstance(roles, RoleMap) else roles,
    )
    clip = backbone if isinstance(backbone, Clip) else None
    first = prepare(spec.changed(method="zeroshot", calibrate=True), images, clip=clip, device=device)
    images, clip = first.images, first.method.clip
    require_one_label(images, "choose")
    if not image_folds(images.labels, 2, spec.seed, first.duplicates):
        raise DataError(
            f"{images.name}: every class has a single image (copies are not counted), so none can be held "
            "out to compare methods; add a second image to some classes"
        )
    candidates, cached = list[Candidate](), list[FrozenViews | None]()
    for kind in kinds:
        progress(kind.name, len(candidates), len(kinds))
        role_map = roles if kind.uses_roles and isinstance(roles, RoleMap) else None
        job = prepare(
            spec.changed(method=kind.name),
            images,
            drawn=True,
            clip=clip,
            roles=role_map,
            duplicates=first.duplicates,
        )
        candidates.append(_cross_validate(job, folds, began + 60 * minutes, cached))
    progress(kinds[-1].name, len(kinds), len(kinds))
    compared = [one for one in candidates if one.trained is not None]
    if not compared:
        reasons = "; ".join(f"{one.title} {one.skipped}" for one in candidates)
        raise UsageError(f"no method could be compared in {minutes:g} minutes ({reasons}); allow more time")
    on_new = [one for one in compared if one.new is not None]
    choice = Choice(
        tuple(candidates),
        _best(compared, "trained"),
        _best(on_new, "new") if on_new else None,
        tuple(_notes(first, folds, candidates)),
        time.monotonic() - began,
    )
    if not adapt:
        return choice
    model = train(
        data,
        out,
        method=choice.pick.method,
        backbone=clip,
        roles=roles if find_method(choice.pick.method).uses_roles else None,
        seed=seed,
        recipe=recipe,
        unreadable=unreadable,
        data_root=data_root,
        template=template,
        texts=texts,
        progress=progress,
    )
    return replace(choice, run=model)


def _cross_validate(job: Job, folds: int, deadline: float, cached: list[FrozenViews | None]) -> Candidate:
    """Cross-validate one method, unless that would take longer than the time that remains."""
    method, began = job.method, time.monotonic()
    candidate = Candidate(job.spec.method, method.title, job.spec.preset)
    remaining, expected = max(0.0, deadline - began), estimate(job)
    needed = 0.0 if expected is None else expected.training * (folds - 1 + 0.5 * method.open_classes)
    if needed > remaining:
        reason = f"needs about {format_duration(needed)}, {format_duration(remaining)} remained"
        return replace(candidate, skipped=reason, needed=needed)
    if not remaining:
        return replace(candidate, skipped="no time remained", needed=max(needed, 1.0))
    views = _views(job, cached)
    if reads_features(method, job.recipe):
        began = time.monotonic()  # others use the same features
    try:
        trials = trials_of(job, views, stop=lambda: time.monotonic() > deadline)
        held = predict_held_out(method, trials, folds)
        assert held is not None  # some class has two images
        new = _on_new(job, trials) if method.open_classes else None
    except Paused:
        return replace(candidate, skipped="was not finished in time", needed=2 * max(needed, remaining))
    seconds = time.monotonic() - began
    return replace(candidate, trained=_right(held, method.modes[0]), new=new, seconds=seconds)


def _views(job: Job, cached: list[FrozenViews | None]) -> FrozenViews | None:
    """Frozen features of the images; methods that read the frozen feature share them."""
    if not reads_features(job.method, job.recipe):
        return shared_views(job.method, job.base, job.recipe)
    if not cached:
        cached.append(shared_views(job.method, job.base, job.recipe))
    return cached[0]


def _on_new(job: Job, trials: Trials) -> Tensor | None:
    """Right or wrong on images of held-out classes, answered among those; None: too few classes."""
    mode, parts = job.method.modes[0], []
    for split in predict_held_out_classes(job.method, trials):
        first = len(split.trained)
        in_group = split.labels >= first
        if len(split.new) > 1:
            parts.append(split.logits[mode][in_group, first:].argmax(dim=1) == split.labels[in_group] - first)
    return torch.cat(parts) if parts else None


def _right(held: HeldOut, mode: str) -> Tensor:
    order = held.rows.argsort()
    return (held.logits[mode].argmax(dim=1) == held.labels)[order]


def _best(candidates: Sequence[Candidate], column: str) -> Candidate:
    """The quickest of those as good as the most accurate: training that gains nothing is not recommended."""
    accuracy = {id(one): float(getattr(one, column).double().mean()) for one in candidates}
    best = max(candidates, key=lambda one: accuracy[id(one)])
    worth = max(WORTH, 1 / len(getattr(best, column)))  # one image is no gain
    near = [one for one in candidates if accuracy[id(one)] >= accuracy[id(best)] - worth]
    return min(near, key=_cost)


def _cost(candidate: Candidate) -> tuple[int, float]:
    """What sorts the quickest method first, the same in every run."""
    if candidate.method in QUICKEST:
        return QUICKEST.index(candidate.method), 0.0
    return len(QUICKEST), candidate.seconds


def _notes(job: Job, folds: int, candidates: Sequence[Candidate]) -> list[str]:
    """What the reader should know about the data."""
    images = job.images
    counts = torch.bincount(images.labels, minlength=len(images.classes))
    notes = [f"{len(images)} images of {len(images.classes)} classes, cross-validation with {folds} folds"]
    notes += [] if job.duplicates is None else duplicate_notices(job.duplicates, images)
    single = [name for name, count in zip(images.classes, counts.tolist(), strict=True) if count == 1]
    if single:
        notes.append(
            f"{len(single)} classes have a single image, which is never held out; the accuracies do not "
            f"cover them ({', '.join(single[:3])}{', …' if len(single) > 3 else ''})"
        )
    if len(images.classes) < 4:
        notes.append(
            f"with {len(images.classes)} classes none can be held out, so accuracy on new classes is not "
            "estimated; four are needed"
        )
    skipped = [one.title for one in candidates if one.skipped is not None]
    if skipped:
        notes.append(f"{join_names(skipped)}: skipped for lack of time; one of them may be more accurate")
    return notes
