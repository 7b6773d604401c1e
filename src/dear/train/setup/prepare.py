"""Everything that a training needs, loaded and checked before it starts: a Spec in, a `Job` out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dear.clip.cpu import fast_bfloat16
from dear.clip.factory import load, pick_device
from dear.clip.model import Clip
from dear.data.duplicates import Duplicates, find_duplicates
from dear.data.folds import IntArray
from dear.data.images import ImageSet, targets_of
from dear.data.open import open_data
from dear.data.shots import few_shot
from dear.data.texts import resolve_texts
from dear.data.tree import resolve_tree
from dear.data.unreadable import check_images
from dear.errors import DataError
from dear.heads.focus import FocusChoice
from dear.heads.roles import RoleMap
from dear.methods import build_method, find_method
from dear.methods.base import Method
from dear.methods.texts import ClassTexts
from dear.runs.class_lists import find_twins
from dear.runs.recipe import Recipe
from dear.runs.spec import Spec, data_digest
from dear.shortcuts.edit_plan import EditPlan, plan_edits, split_without
from dear.shortcuts.edit_trials import WAYS as EDIT_WAYS
from dear.shortcuts.edited_images import JoinedImages
from dear.shortcuts.removal import combine
from dear.shortcuts.without import RemovedConcepts, Without, remove_concepts
from dear.train.frozen import SHARED_VIEWS
from dear.train.setup.balance import balanced_rows, counts, enough_steps
from dear.train.setup.focus import check_focus, find_focus, focus_notices, focus_options
from dear.train.setup.notices import backbone_notices, duplicate_notices, image_notices, split_notices
from dear.train.setup.roles import roles_for
from dear.train.setup.unlabeled import Pool, find_pool, prepare_pool
from dear.train.teacher import Teacher, repeat_labeled
from dear.unlabeled import classes_without_labels
from dear.utils.files import PathLike
from dear.utils.progress import Progress


@dataclass(frozen=True, eq=False)
class Job:
    """A training that can start."""

    spec: Spec  #: complete
    method: Method  #: untrained
    images: ImageSet  #: each once, all readable
    recipe: Recipe
    available: int  #: images of the split, before the draw
    unreadable: tuple[str, ...] = ()  #: why images were left out, one sentence each
    notices: tuple[str, ...] = ()  #: sentences that the user should read first
    removed_concepts: RemovedConcepts | None = None  #: of concepts, where some were removed
    focus: FocusChoice | None = None  #: on the heads of a role, if requested
    edits: EditPlan | None = None  #: of properties of the images, where some were removed
    duplicates: Duplicates | None = None  #: copies among the images, where some images will be held out
    pool: Pool | None = None  #: unlabeled images, and what was decided about them

    @property
    def rows(self) -> list[int]:
        """Indices of the images that an epoch shows; those of rare classes are repeated.

        Unlabeled images that are trained on follow the labeled ones.
        """
        if self.teacher is not None:
            labels = torch.cat([self.images.labels, self.teacher.images.labels])
            return repeat_labeled(labels, len(self.images), self.teacher.weight, self.spec.balance)
        return balanced_rows(self.images.labels) if self.spec.balance else list(range(len(self.images)))

    @property
    def teacher(self) -> Teacher | None:
        """Labels unlabeled images; None where none are trained on."""
        return None if self.pool is None else self.pool.teacher

    @property
    def base(self) -> ImageSet:
        """The images, followed by the unlabeled images that are trained on."""
        return self.images if self.teacher is None else JoinedImages.of(self.images, self.teacher.images)

    @property
    def units(self) -> IntArray | None:
        """The units of the images of `training_set`: copies and edited copies of an image have the same.

        None: copies were not searched.
        """
        if self.duplicates is None:
            return None
        edits = () if self.edits is None else self.edits.copies
        base = self.duplicates.units_of(range(len(self.base)))
        return np.concatenate([base, *[self.duplicates.units] * len(edits)])

    @property
    def steps(self) -> int:
        """Training steps, none for a method without trained parameters (which may be empty before)."""
        if not any(parameter.requires_grad for parameter in self.method.parameters()):
            return 0
        return self.recipe.epochs * -(-len(self.training_set[1]) // self.recipe.batch)

    @property
    def training_set(self) -> tuple[ImageSet, list[int]]:
        """All training images, and the indices of those that an epoch shows.

        That are the images, unlabeled images with pseudo-labels, and edited copies of the images.
        """
        base, count, rows = self.base, len(self.images), self.rows
        copies = () if self.edits is None else self.edits.copies
        if not copies:
            return base, rows
        labeled = [row for row in rows if row < count]
        shown = rows + [len(base) + block * count + row for block in range(len(copies)) for row in labeled]
        return JoinedImages.of(base, *copies), shown

    def on(self, clip: Clip) -> Job:
        """The same training on another backbone, such as one with another correction."""
        other = self.method.untrained_copy(clip, seed=self.spec.seed)
        return replace(self, method=other, spec=Spec.of(other, self.recipe, self.images, self.spec))


def prepare(
    spec: Spec,
    data: ImageSet | None = None,
    *,
    drawn: bool = False,
    clip: Clip | None = None,
    roles: RoleMap | None = None,
    without: Without | None = None,
    concept_roles: PathLike | RoleMap | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    duplicates: Duplicates | None = None,
    unlabeled: ImageSet | None = None,
) -> Job:
    """Load and check everything that a training needs.

    Args:
        spec: what to train.
        data: the images; None: `spec.split` of `spec.data`.
        drawn: `data` are the very images to train on: no shots are drawn from them.
        clip: the backbone; None: `spec.backbone` is loaded on `device`.
        roles: role map, instead of `spec.roles`.
        without: concepts to remove, instead of `spec.without`.
        concept_roles: role map for their removal; None: the method's.
        device: "auto", "cpu", "cuda", ...
        progress: called with (stage, done, total).
        duplicates: copies among `data`, where they are known.
        unlabeled: images without labels, instead of those that `spec.unlabeled` names.
    """
    kind = find_method(spec.method)
    if spec.focus is not None:
        check_focus(kind)
    images, available, unreadable = _training_images(spec, data, drawn)
    several = targets_of(images) is not None
    if several:
        spec = _with_several_labels(spec, without is not None or unlabeled is not None)
    template = spec.template or images.template
    tree = spec.tree or getattr(images, "parents", None) or {}
    if tree and several:
        raise DataError("tree: needs one label per image, but the data has several (labels)")
    spec = spec.changed(tree=resolve_tree(tree, images.classes))
    listed = spec.texts or getattr(images, "texts", None) or {}
    texts = ClassTexts(resolve_texts(listed, images.classes, template) if listed else {})
    if unlabeled is None and spec.unlabeled_weight != 0:
        unlabeled = find_pool(spec, images, None if drawn else available, drawn)
    clip = load(spec.backbone_source(), device=pick_device(device)) if clip is None else clip
    notices = [*backbone_notices(clip, images), *image_notices(images, spec.balance)]
    missing = () if unlabeled is None else classes_without_labels(images.labels, images.classes)
    if missing:
        names = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        notices.append(f"no image is labeled {names}: these classes are learned from their names alone")
    notices += split_notices(spec.data, spec.root) if data is None else []
    if duplicates is None and (
        kind.holds_out
        or spec.calibrate
        or spec.focus is not None
        or spec.without
        or without is not None
        or unlabeled is not None
    ):
        duplicates = find_duplicates(images)
    units = None if duplicates is None else duplicates.units
    notices += [] if duplicates is None else duplicate_notices(duplicates, images)
    source = spec.roles if roles is None else roles
    role_map = None
    if kind.uses_roles or spec.focus is not None:
        role_map, more = roles_for(clip, images, source, progress)
        notices += more
    options = explicit_options(spec)

    def build(clip: Clip, options: Mapping[str, Any]) -> Method:
        return build_method(
            spec.method,
            clip,
            images.classes,
            roles=role_map if kind.uses_roles else None,
            allow_other_roles=spec.allow_other_roles,
            template=template,
            texts=texts,
            several=several,
            ids=None if spec.ids is None else torch.tensor(spec.ids, dtype=torch.long),
            seed=spec.seed,
            **options,
        )

    removed = edits = None
    if without is None and spec.without:
        without = Without.of(spec.without, spec.way, spec.examples or None)
    if without is not None:
        used = concept_roles or role_map or source
        trains_tower = build(clip, options).cut != "feature"
        clip, removed, edits = _without(clip, images, without, used, spec.seed, trains_tower, progress, units)
        for removal in (edits, removed):
            if removal is not None:
                notices += [f"Removed before training: {removal.title}.", *removal.notices]
        copies = edits.kinds if edits is not None and edits.copies else ()
        spec = spec.changed(**_removal_fields(without), copies=copies)
    focus = None
    if spec.focus is not None and role_map is not None:
        role_map.check(clip, spec.allow_other_roles)
        focus = find_focus(clip, images, spec.focus, role_map, progress, units)
        notices += focus_notices(focus, clip, role_map, kind)
        options |= focus_options(focus, kind)
    method = build(clip, options)
    if method.notice:
        notices.append(method.notice)
    pool = None
    if unlabeled is not None and spec.unlabeled_weight != 0:
        spec = spec.changed(unlabeled_digest=data_digest(unlabeled))
        epoch_recipe = partial(recipe_for, spec.changed(balance=False), method)
        pool = prepare_pool(spec, method, images, epoch_recipe, unlabeled, duplicates, progress)
        notices.append(pool.sentence())
    recipe = recipe_for(spec, method, images.labels)
    spec = spec.changed(preset=spec.preset or kind.recommended())
    job = Job(
        Spec.of(method, recipe, images, spec), method, images, recipe, len(available), unreadable,
        tuple(notices), removed, focus, edits, duplicates, pool,
    )  # fmt: skip
    if job.teacher is None:
        return job
    shown, rows = job.training_set
    recipe = recipe_for(spec.changed(balance=False), method, shown.labels[torch.tensor(rows)])
    return replace(job, recipe=recipe, spec=Spec.of(method, recipe, images, spec))


def _with_several_labels(spec: Spec, more: bool) -> Spec:
    """The Spec for images with several labels, which are shown once each; refuse what needs one label."""
    limits = {"unlabeled": spec.unlabeled, "without": spec.without, "focus": spec.focus}
    used = next((name for name, value in limits.items() if value), "without or unlabeled" if more else None)
    if used is not None:
        raise DataError(f"{used}: needs one label per image, but the data has several (labels); leave it out")
    return spec.changed(balance=False)


def explicit_options(spec: Spec) -> dict[str, Any]:
    """Options of the method that differ from its defaults: those of the Spec and of its preset."""
    kind = find_method(spec.method)
    defaults = {} if explicit_recipe(spec).get("augment") else kind.options_without_augmentation
    return {**defaults, **kind.preset(spec.preset).options, **spec.options}


def explicit_recipe(spec: Spec) -> dict[str, Any]:
    """Recipe values that the Spec or its preset sets."""
    return {**find_method(spec.method).preset(spec.preset).recipe, **spec.recipe}


def recipe_for(spec: Spec, method: Method, labels: Tensor) -> Recipe:
    """The recipe of a training: values of the Spec, and defaults that depend on the method and the images.

    A method that reads only features is trained on those of the evaluation view, which are computed once and
    cached, unless its recipe sets `augment`. A small set (labels [n]) is trained for more epochs.
    """
    explicit = explicit_recipe(spec)
    changes = {**_cpu_recipe(method), "seed": spec.seed}
    if method.cut == "feature":
        changes["augment"] = bool(method.recipe.get("augment", False))
    recipe = Recipe.of(type(method), **{**changes, **explicit})
    if "epochs" in explicit:
        return recipe
    return enough_steps(recipe, len(balanced_rows(labels)) if spec.balance else len(labels))


def _cpu_recipe(method: Method) -> dict[str, Any]:
    """Faster defaults for training through a tower on a CPU, unless the Spec sets these values.

    Where layers are frozen or a frozen pass is read, images have a few fixed views, whose frozen part is
    computed once; matrices are in bfloat16, as on a GPU, where the processor is faster with it.
    """
    device, changes = method.clip.device, dict[str, Any]()
    if device.type != "cpu" or not isinstance(method.cut, int):
        return changes
    if method.cut > 1 or method.reads_frozen:
        changes["views"] = SHARED_VIEWS
    if method.clip.dtype == torch.float32 and fast_bfloat16(device):
        changes["precision"] = "bfloat16"
    return changes


def _without(
    clip: Clip,
    images: ImageSet,
    without: Without,
    roles: PathLike | RoleMap | None,
    seed: int,
    trains_tower: bool,
    progress: Progress | None,
    units: IntArray | None,
) -> tuple[Clip, RemovedConcepts | None, EditPlan | None]:
    """The backbone without concepts and directions of edits, and how each was removed.

    A method that trains the image tower relearns a property that is removed behind it: unless another way
    is named, it learns from edited copies.
    """
    kinds, concepts = split_without(without)
    removed = (
        None if concepts is None else remove_concepts(clip, images, concepts, roles, trains_tower, units)
    )
    if not kinds:
        return clip if removed is None else removed.clip, removed, None
    way = without.way if without.way in EDIT_WAYS or concepts is None else "auto"
    way = "copies" if way == "auto" and trains_tower else way
    edits = plan_edits(clip, images, kinds, way, seed, progress, units)
    parts = [] if removed is None else [removed.removal]
    if edits.removal is not None:
        # Directions are computed on some of the images; their removal keeps the mean over all images.
        center = edits.removal.center if removed is None else removed.removal.center
        parts.append(replace(edits.removal, center=center))
    if parts:
        clip = clip.with_correction(combine(*parts).correction())
    return clip, removed, edits


def _removal_fields(without: Without) -> dict[str, object]:
    """A removal as fields of a Spec; examples that are no folders go by their names."""
    examples = {
        concept: source.name if isinstance(source, ImageSet) else os.fspath(source)
        for concept, source in without.examples.items()
    }
    return {"without": without.concepts, "way": without.way, "examples": examples}


def _training_images(
    spec: Spec, data: ImageSet | None, drawn: bool
) -> tuple[ImageSet, ImageSet, tuple[str, ...]]:
    """The images to train on, those that they were drawn from, and why some cannot be read."""
    images = open_training(spec) if data is None else data
    if spec.classes and spec.classes != images.classes:
        images = images.select_classes(spec.classes)
    available = images
    if not drawn:
        check_task(images)
        if spec.shots:
            images = few_shot(images, spec.shots, spec.seed)
    report = check_images(images, spec.unreadable)
    if report.unreadable and not drawn:
        check_task(report.kept)
    return report.kept, available, tuple(item.reason for item in report.unreadable)


def open_training(spec: Spec) -> ImageSet:
    """The images that a Spec names, before any draw."""
    if spec.data is None:
        raise DataError(
            f"the dataset of this training is not recorded ({spec.dataset or 'in memory'}); pass data"
        )
    # The template of the data is used if the Spec has none.
    template = spec.template or None
    return open_data(spec.data, spec.split, root=spec.root, template=template, margin=spec.margin)


def check_task(images: ImageSet) -> None:
    """Raise a DataError for a training set that no classifier can be trained on."""
    if len(images.classes) < 2:
        raise DataError(
            f"{images.name}: has only the class {images.classes[0]!r}; a classifier needs at least two"
        )
    for name, count in zip(images.classes, counts(images), strict=True):
        if count == 0:
            raise DataError(f"{images.name}: the class {name!r} has no images; add some or remove the class")
    twins = find_twins(images.classes)
    if twins is not None:
        raise DataError(
            f"{images.name}: the classes {twins[0]!r} and {twins[1]!r} are the same words to CLIP, which "
            "ignores case; rename one or merge them"
        )


def check_held_out(images: ImageSet, held_out: ImageSet) -> None:
    """Refuse test images of classes that are not trained.

    Raises:
        DataError: names those classes.
    """
    new = [name for name in held_out.classes if name not in set(images.classes)]
    if new:
        listed = ", ".join(map(repr, new[:5])) + (f" and {len(new) - 5} more" if len(new) > 5 else "")
        raise DataError(
            f"{held_out.name}: the test images show classes without training images: {listed}; add training "
            "images or remove these classes"
        )
