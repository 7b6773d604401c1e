"""Unlabeled images before a training: read them, decide whether they help, label the confident ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.data.content import content_digest
from dear.data.duplicates import MAX_IMAGES, Duplicates, matching_pairs, read_prints
from dear.data.images import DataSource, ImageSet
from dear.data.open import open_data
from dear.data.unlabeled import REST, Relabeled, open_unlabeled, rest_of, unlabeled_part
from dear.data.unreadable import find_unreadable
from dear.errors import DataError, UsageError
from dear.methods.base import Method
from dear.runs.feature_cache import FeatureCache
from dear.runs.recipe import Recipe
from dear.runs.spec import Spec
from dear.shortcuts.edited_images import JoinedImages
from dear.train.crossval import Trials, predict_held_out
from dear.train.frozen import views_for
from dear.train.setup.balance import balanced_rows
from dear.train.teacher import Teacher, repeat_labeled
from dear.unlabeled import (
    UNLABELED,
    Comparison,
    PseudoLabels,
    Reason,
    compare_with_labeled_only,
    draw_rows,
    fit_semi_supervised_probe,
    judge_pool,
    mean_confidence,
    measure_nearness,
    pseudo_label_share,
    select_pseudo_labels,
)
from dear.unlabeled.pool import FOLDS, MAX_COMPARED, MAX_FOREIGN_SHARE, MIN_COMPARED, MIN_CONFIDENCE
from dear.utils.progress import Progress

RecipeFor = Callable[[Tensor], Recipe]
MOST_QUICK = 5_000  #: pseudo-labeled images that a method on frozen features is trained on
MOST_PER_CLASS = 64  #: pseudo-labeled images per class for methods that run a tower in every step


@dataclass(frozen=True, eq=False)
class Pool:
    """Unlabeled images of a training, and what was decided about them."""

    images: int  #: readable, without copies
    copies: int  #: of labeled images or of test images of the same dataset, left out
    unreadable: tuple[str, ...]  #: why others were left out, one sentence each
    foreign: int  #: farther from the labeled images than these are from each other
    nearness: tuple[float, float]  #: median cosine with the nearest labeled images, and the limit
    reason: Reason | str  #: "helps", "no gain", "unknown", "unsure", "far", or "weight": the Spec decides
    comparison: Comparison  #: cross-validated, by the method itself where it is quick, else by a probe
    by_method: bool  #: whether the comparison is by the method itself
    teacher: Teacher | None  #: None: the images are not used
    confidences: Tensor  #: of the pseudo-labels, [p]
    confidence: float = 0.0  #: mean probability of the answers to all of them that are not foreign

    @property
    def used(self) -> int:
        """Unlabeled images that are trained on."""
        return 0 if self.teacher is None else len(self.teacher.chosen)

    def sentence(self) -> str:
        """What was decided, and why."""
        cross, (median, limit) = self.comparison, self.nearness
        skipped = f"the {self.images} unlabeled images are left out"
        if self.reason == "far":
            return (
                f"{skipped}: {self.foreign} are farther from the labeled images (median nearness "
                f"{median:.2f}) than these are from each other (at least {limit:.2f})"
            )
        foreign = f"; {self.foreign} are foreign (nearness below {limit:.2f})" if self.foreign else ""
        start = f"{self.used} of {self.images} unlabeled images are trained on{foreign}"
        if self.reason == "weight":
            return f"{start}; unlabeled_weight decides that they are"
        unmeasured = (
            f"whether they help cannot be measured, because {cross.images} labeled images can be held out, "
            f"fewer than {MIN_COMPARED}"
        )
        if self.reason == "unsure":
            return (
                f"{skipped}: {unmeasured}, and the answers to them are uncertain (mean probability "
                f"{self.confidence:.2f}, below {MIN_CONFIDENCE}); unlabeled_weight uses them anyway"
            )
        if self.reason == "unknown":
            return f"{start}; {unmeasured}, but the answers to them are certain ({self.confidence:.2f})"
        after, before = (right / cross.images for right in (cross.with_pool, cross.labeled_only))
        probe = "" if self.by_method else " of a probe"
        measured = (
            f"cross-validated accuracy{probe} on {cross.images} labeled images is {after:.1%} with them, "
            f"{before:.1%} without"
        )
        if self.reason == "no gain":
            return f"{skipped}: {measured}"
        return f"{start}: {measured}"

    def to_dict(self) -> dict[str, Any]:
        """For `metrics.json`."""
        cross, teacher = self.comparison, self.teacher
        facts: dict[str, Any] = {
            "images": self.images,
            "used": self.used,
            "reason": self.reason,
            "foreign": self.foreign,
            "copies_of_labeled": self.copies,
            "unreadable": len(self.unreadable),
            "mean_confidence": round(self.confidence, 4),
            "nearness": {"median": round(self.nearness[0], 4), "limit": round(self.nearness[1], 4)},
        }
        if cross.images:
            facts["cross_validation"] = {"by": "method" if self.by_method else "probe", **cross.to_dict()}
        if teacher is not None:
            classes, labels = teacher.images.classes, teacher.images.labels
            counts = torch.bincount(labels, minlength=len(classes)).tolist()
            facts |= {
                "weight": teacher.weight,
                "per_class": dict(zip(classes, counts, strict=True)),
                "confidence": {
                    "mean": round(float(self.confidences.mean()), 4),
                    "least": round(float(self.confidences.min()), 4),
                },
            }
        return facts


def find_pool(spec: Spec, images: ImageSet, all_images: ImageSet | None, drawn: bool) -> ImageSet | None:
    """The unlabeled images that a Spec names or that its dataset holds; None: there are none.

    Args:
        spec: names them in `unlabeled`.
        images: the labeled images.
        all_images: those that `images` were drawn from; None: not known.
        drawn: whether the images were drawn before, so that the rest of their dataset is not used.

    Raises:
        DataError: they do not exist.
        UsageError: "rest" without a draw.
    """
    if spec.unlabeled == REST:
        if all_images is None or not spec.shots:
            raise UsageError("unlabeled='rest' needs shots: it means the training images that they leave out")
        return rest_of(all_images, images)
    if spec.unlabeled is not None:
        return open_unlabeled(spec.unlabeled, spec.root)
    source: DataSource | None = getattr(images, "source", None)
    if drawn or source is None:
        return None
    return unlabeled_part(source.spec, source.root, spec.margin)


def prepare_pool(
    spec: Spec,
    method: Method,
    images: ImageSet,
    recipe_for: RecipeFor,
    pool: ImageSet,
    duplicates: Duplicates | None = None,
    progress: Progress | None = None,
) -> Pool:
    """Read unlabeled images, decide whether they are used, and label the confident ones.

    Args:
        spec: `unlabeled_weight` decides; None: a cross-validation does.
        method: untrained.
        images: the labeled images [n].
        recipe_for: the recipe of a training, by the labels of the images that an epoch shows.
        pool: the unlabeled images.
        duplicates: copies among the labeled images, which are held out together.
        progress: called with (stage, done, total).

    Raises:
        DataError: no unlabeled image can be read, or all are labeled or test images.
    """
    named = spec.unlabeled not in (None, REST)
    pool, unreadable, copies = _distinct(pool, images, _test_images(spec, images) if named else None)
    clip = method.clip
    cache = FeatureCache()
    labeled = F.normalize(cache.image_features(clip, images, progress), dim=1)
    features = torch.cat([labeled, F.normalize(cache.image_features(clip, pool, progress), dim=1)])
    texts = (method.prompts.frozen[:, : features.shape[1]] * clip.logit_scale).float().cpu()
    count, labels = len(images), images.labels.cpu()
    nearness = measure_nearness(features[count:], labeled)
    median = float(nearness.values.median()) if len(nearness.values) else 0.0
    nothing = Comparison(0, 0, 0, 0, 0)
    base = Pool(
        len(pool), copies, unreadable, int(nearness.foreign.sum()), (median, nearness.limit), "far", nothing,
        False, None, torch.zeros(0),
    )  # fmt: skip
    forced = spec.unlabeled_weight is not None
    if nearness.share > MAX_FOREIGN_SHARE or bool(nearness.foreign.all()):
        return base
    in_pool = (~nearness.foreign).nonzero()[:, 0]  # indices in the pool
    rows = torch.cat([torch.arange(count), count + in_pool])
    partial_labels = torch.full((len(rows),), UNLABELED, dtype=torch.int64)
    partial_labels[:count] = labels
    groups = torch.full_like(partial_labels, -1)
    groups[:count] = torch.arange(count) if duplicates is None else torch.from_numpy(duplicates.units)
    fit = fit_semi_supervised_probe(features[rows], partial_labels, texts)
    cross = compare_with_labeled_only(features[rows], partial_labels, texts, groups)
    share = pseudo_label_share(cross, fit.agreement)
    pseudo = _limit(
        select_pseudo_labels(fit.probabilities, partial_labels == UNLABELED, share), len(texts), method.quick
    )
    # The teacher of a cross-validation reads a part of a large pool, and all that is trained on.
    part = torch.cat([draw_rows(torch.arange(count, len(rows)), MAX_COMPARED), pseudo.rows]).unique()
    chosen = torch.searchsorted(part, pseudo.rows)
    labeled_images = Relabeled(
        pool.subset(in_pool[pseudo.rows - count].tolist()), pseudo.labels, method.classes
    )
    confidence = mean_confidence(fit.probabilities, partial_labels)
    weight = 1.0 if spec.unlabeled_weight is None else spec.unlabeled_weight
    if not forced and cross.images < MIN_COMPARED and method.quick:
        weight = min(1.0, count / len(pseudo.rows))  # little is measured: they weigh no more than the labels
    teacher = Teacher(
        features[rows[torch.cat([torch.arange(count), part])]],
        texts,
        fit.probabilities[part].argmax(dim=1),
        chosen,
        labeled_images,
        weight,
    )
    reason: Reason | str = "weight"
    if not forced:
        if cross.images and method.quick:
            cross = compare_trainings(spec, method, images, recipe_for, teacher, duplicates)
        reason = judge_pool(cross, confidence)
    left_out = reason in ("no gain", "unsure")
    return replace(
        base,
        reason=reason,
        comparison=nothing if forced else cross,
        by_method=method.quick and bool(cross.images) and not forced,
        teacher=None if left_out else teacher,
        confidences=torch.zeros(0) if left_out else pseudo.confidences,
        confidence=confidence,
    )


def compare_trainings(
    spec: Spec,
    method: Method,
    images: ImageSet,
    recipe_for: RecipeFor,
    teacher: Teacher,
    duplicates: Duplicates | None = None,
) -> Comparison:
    """Cross-validate the method itself with and without the unlabeled images."""
    repeated = balanced_rows if spec.balance else None
    joined = JoinedImages.of(images, teacher.images)
    shown_labels = joined.labels[
        torch.tensor(repeat_labeled(joined.labels, len(images), teacher.weight, spec.balance))
    ]
    labels_without = (
        images.labels[torch.tensor(balanced_rows(images.labels))] if spec.balance else images.labels
    )
    recipe = recipe_for(labels_without)
    without = Trials(images, recipe, views_for(method, joined, recipe), repeated, duplicates=duplicates)
    correct = []
    for trials in (without, replace(without, teacher=teacher, recipe=recipe_for(shown_labels))):
        answers = predict_held_out(method, trials, FOLDS)
        if answers is None:
            return Comparison(0, 0, 0, 0, 0)
        logits = answers.logits[method.pick_mode(None)]
        order = answers.rows.argsort()
        correct.append((logits.argmax(dim=1) == answers.labels)[order])
    before, after = correct
    parts = (before | ~before, before, after, after & ~before, before & ~after)
    return Comparison(*(int(part.sum()) for part in parts))


def _test_images(spec: Spec, images: ImageSet) -> ImageSet | None:
    """The test images of the dataset that the labeled images come from; None where it has none."""
    source: DataSource | None = getattr(images, "source", None)
    if source is None:
        return None
    try:  # by the name in the Spec where there is one, so that no note is repeated with the absolute path
        return open_data(source.spec if spec.data is None else spec.data, "test", root=source.root)
    except DataError:
        return None


def _distinct(
    pool: ImageSet, images: ImageSet, tests: ImageSet | None
) -> tuple[ImageSet, tuple[str, ...], int]:
    """Readable images of a pool that are neither labeled nor test images, why others are not, and copies."""
    unreadable_images = find_unreadable(pool, range(len(pool)))
    indices = {item.index for item in unreadable_images}
    readable = [index for index in range(len(pool)) if index not in indices]
    others = [other_set for other_set in (images, tests) if other_set is not None]
    used_contents = {
        content_digest(other_set, index) for other_set in others for index in range(len(other_set))
    }
    rows = [index for index in readable if content_digest(pool, index) not in used_contents]
    copies_of_others = _near_copies(pool.subset(rows), others)
    rows = [row for index, row in enumerate(rows) if index not in copies_of_others]
    if not readable:
        raise DataError(
            f"{pool.name}: none of the {len(pool)} unlabeled images can be read; the first: "
            f"{unreadable_images[0].reason}"
        )
    if not rows:
        raise DataError(
            f"{pool.name}: all {len(readable)} images are labeled or test images of the dataset; unlabeled "
            "images must be others"
        )
    return pool.subset(rows), tuple(item.reason for item in unreadable_images), len(readable) - len(rows)


def _near_copies(pool: ImageSet, others: Sequence[ImageSet]) -> set[int]:
    """Places of the images of a pool that are re-saved, resized or mirrored images of other sets."""
    if len(pool) + sum(map(len, others)) > MAX_IMAGES:
        return set()
    indices, prints = read_prints(pool)
    pairs = [pair for other_set in others for pair in matching_pairs(prints, read_prints(other_set)[1])]
    return {int(indices[index]) for rows, _, _ in pairs for index in rows.tolist()}


def _limit(pseudo: PseudoLabels, classes: int, quick: bool) -> PseudoLabels:
    """The most confident images of each class, as many as a training can take."""
    most = max(MOST_PER_CLASS, MOST_QUICK // classes) if quick else MOST_PER_CLASS
    rows = []
    for label in pseudo.labels.unique().tolist():
        members = (pseudo.labels == label).nonzero()[:, 0]
        order = pseudo.confidences[members].argsort(descending=True, stable=True)
        rows.append(members[order[:most]])
    kept = torch.cat(rows).sort().values
    return PseudoLabels(pseudo.rows[kept], pseudo.labels[kept], pseudo.confidences[kept])
