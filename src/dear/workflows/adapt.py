"""Training on a person's own images: `dear adapt`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from dear.clip.device import pick_device
from dear.clip.factory import load
from dear.clip.model import Clip
from dear.clip.tokenizer import clean
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.data.shots import few_shot
from dear.errors import DataError
from dear.heads.known import known_roles, read_roles
from dear.heads.roles import RoleMap
from dear.methods import build_method, find_method
from dear.methods.base import Method
from dear.train.loop import Progress
from dear.train.recipe import Recipe
from dear.train.run import Trained, train
from dear.workflows.options import AdaptOptions, PathLike

_log = logging.getLogger("dear")


def adapt(
    data: PathLike | ImageSet,
    out: PathLike | None = None,
    settings: AdaptOptions | None = None,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    **changes: Any,
) -> Trained:
    """Adapt a backbone to a person's own images.

    Args:
        data: what `open_data` takes (its training split is used), or an image set.
        out: run folder; None keeps the result in memory.
        settings: how to adapt; None: the defaults of `AdaptOptions`.
        resume: continue an interrupted run in `out`.
        progress: told after every step.
        stop: asked after every step; True stops.
        changes: fields of `AdaptOptions` by name, instead of those in `settings`.

    Raises:
        DearError: anything a user can correct, in one sentence.

    Example:
        >>> adapt("photos/", "run", method="dear", shots=16, recipe={"epochs": 5})   # doctest: +SKIP
    """
    asked = (settings or AdaptOptions()).changed(**changes)
    options, plan = preset_of(asked)
    images = data if isinstance(data, ImageSet) else open_training(data, asked)
    check_task(images)
    if asked.shots:
        images = few_shot(images, asked.shots, asked.seed)
    method = build(images, asked, options)
    recipe = Recipe.of(method, **{"seed": asked.seed, **plan})
    return train(
        method, images, recipe, out, resume, progress, stop, preset=asked.preset or method.recommended()
    )


def open_training(data: PathLike, asked: AdaptOptions) -> ImageSet:
    """The training split of a dataset."""
    return open_data(data, "train", root=asked.root, template=asked.template)


def build(images: ImageSet, asked: AdaptOptions, options: dict[str, Any]) -> Method:
    """The untrained method for a training set, with every option checked."""
    clip = (
        asked.backbone
        if isinstance(asked.backbone, Clip)
        else load(asked.backbone, device=pick_device(asked.device))
    )
    roles = asked.roles
    if roles is not None and not isinstance(roles, RoleMap):
        roles = read_roles(roles)
    if roles is None and find_method(asked.method).uses_roles:
        roles = known_roles(clip)
    method = build_method(
        asked.method,
        clip,
        images.classes,
        roles=roles,
        allow_other_roles=asked.allow_other_roles,
        template=images.template if asked.template is None else asked.template,
        seed=asked.seed,
        **options,
    )
    method.pick_mode(asked.mode)
    if method.notice:
        _log.warning("dear: %s", method.notice)
    return method


def preset_of(asked: AdaptOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """The method's options and the changes to its recipe: those of the preset, then what was asked for.

    Raises:
        UsageError: the method has no such preset.
    """
    options: dict[str, Any] = dict(asked.options or {})
    recipe: dict[str, Any] = dict(asked.recipe or {})  # type: ignore[arg-type]  # a name became `preset`
    chosen = find_method(asked.method).preset(asked.preset)
    return {**chosen.options, **options}, {**chosen.recipe, **recipe}


def check_task(images: ImageSet) -> None:
    """Refuse a training set that no classifier can be made from, with a sentence that says why.

    Raises:
        DataError: one class, a class without images, or classes that CLIP reads as the same words.
    """
    if len(images.classes) < 2:
        raise DataError(
            f"{images.name}: has only the class {images.classes[0]!r}; a classifier needs at least two"
        )
    counts = torch.bincount(images.labels, minlength=len(images.classes)).tolist()
    for name, count in zip(images.classes, counts, strict=True):
        if count == 0:
            raise DataError(f"{images.name}: the class {name!r} has no images; add some or remove the class")
    read: dict[str, str] = {}
    for name in images.classes:
        other = read.setdefault(clean(name), name)
        if other is not name:
            raise DataError(
                f"{images.name}: the classes {other!r} and {name!r} are the same words to CLIP, which "
                "ignores case; rename one or merge them"
            )
