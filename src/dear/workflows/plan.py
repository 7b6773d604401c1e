"""What an adaptation will do, decided and checked before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dear._io.files import PathLike
from dear._io.progress import Progress
from dear.clip.factory import load, pick_device
from dear.clip.model import Clip
from dear.clip.tokenizer import clean
from dear.data.check import check_images
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.data.shots import few_shot
from dear.errors import DataError
from dear.heads.without import Without, remove
from dear.methods import build_method, find_method
from dear.methods.base import Method
from dear.runs.recipe import Recipe
from dear.train.balance import balanced, counts, enough_steps
from dear.train.notices import backbone_notices, image_notices
from dear.train.roles import roles_for
from dear.workflows.options import AdaptOptions


@dataclass(frozen=True)
class Plan:
    """An adaptation that can start: everything is loaded and checked.

    Attributes:
        method: untrained.
        images: what an epoch walks: images of rare classes may occur more than once.
        distinct: the images, each once.
        recipe: how it will be trained.
        available: images of the training split.
        used: different images that are trained on.
        unreadable: why images were left out, one sentence each.
        notices: sentences that the user should read first.
    """

    method: Method
    images: ImageSet
    distinct: ImageSet
    recipe: Recipe
    available: int
    used: int
    unreadable: tuple[str, ...]
    notices: tuple[str, ...]
    preset: str | None = None  #: name of the setting that options and recipe were taken from
    balance: bool = True  #: whether images of rare classes are repeated
    calibrate: bool = True

    @property
    def steps(self) -> int:
        """Training steps, none for a method without trained parameters."""
        if not self.method.trainable_parameters:
            return 0
        return self.recipe.epochs * -(-len(self.images) // self.recipe.batch)


def plan_adaptation(data: PathLike | ImageSet, asked: AdaptOptions, progress: Progress | None = None) -> Plan:
    """Load and check everything that an adaptation needs.

    Raises:
        DearError: anything a user can correct, in one sentence.
    """
    options, changes = preset_of(asked)
    kind = find_method(asked.method)
    images = data if isinstance(data, ImageSet) else open_training(data, asked)
    check_task(images)
    available = len(images)
    images, unreadable = _training_images(images, asked)
    clip = backbone_of(asked)
    notices = [*backbone_notices(clip, images), *image_notices(images, asked.balance)]
    roles = None
    if kind.uses_roles:
        roles, more = roles_for(clip, images, asked.roles, progress)
        notices += more
    if asked.without is not None:
        without = Without.of(asked.without, examples=asked.examples)
        removal = remove(clip, images, without, roles or asked.roles, heads_first=not kind.reads_feature)
        clip = removal.clip
        notices += [f"Removed before training: {removal.repair.title}.", *removal.notices]
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
        notices.append(method.notice)
    used, distinct = len(images), images
    if asked.balance:
        images = balanced(images)
    if kind.reads_feature:
        changes.setdefault("augment", False)  # the features are then computed once
    recipe = Recipe.of(method, **{"seed": asked.seed, **changes})
    if "epochs" not in (asked.recipe or {}):
        recipe = enough_steps(recipe, len(images))
    return Plan(
        method,
        images,
        distinct,
        recipe,
        available,
        used,
        unreadable,
        tuple(notices),
        asked.preset or kind.recommended(),
        asked.balance,
        asked.calibrate,
    )


def _training_images(images: ImageSet, asked: AdaptOptions) -> tuple[ImageSet, tuple[str, ...]]:
    """The shots that can be read, and why others cannot."""
    if asked.shots:
        images = few_shot(images, asked.shots, asked.seed)
    report = check_images(images, asked.unreadable)
    if report.unreadable:
        check_task(report.kept)
    return report.kept, tuple(item.reason for item in report.unreadable)


def open_training(data: PathLike, asked: AdaptOptions) -> ImageSet:
    """The training split of a dataset."""
    return open_data(data, "train", root=asked.root, template=asked.template)


def backbone_of(asked: AdaptOptions) -> Clip:
    """The backbone, loaded on the device that was asked for."""
    if isinstance(asked.backbone, Clip):
        return asked.backbone
    return load(asked.backbone, device=pick_device(asked.device))


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
    for name, count in zip(images.classes, counts(images), strict=True):
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
