"""Evaluates a `Model` on a labeled set, in every mode at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dear.data.images import ImageSet, group_names, require_one_label, targets_of
from dear.errors import DataError, UsageError
from dear.methods.zeroshot import ZeroShot
from dear.runs.evaluation import Evaluation
from dear.runs.several_labels import SeveralLabelsEvaluation
from dear.runs.tree import tree_figures
from dear.utils.progress import Progress

if TYPE_CHECKING:
    from dear.runs.model import Logits, Model


def evaluate(
    model: Model, images: ImageSet, scores: bool, unreadable: str, cached: bool, progress: Progress | None
) -> Evaluation:
    """See `Model.evaluate`."""
    if not isinstance(images, ImageSet):
        raise UsageError(
            f"images must be an image set, got {type(images).__name__}; use dear.evaluate(model, data)"
        )
    if len(images) == 0:
        raise DataError(f"{images.name}: evaluation needs at least one image, got none")
    if model.method.several:
        return _evaluate_sets(model, images, unreadable, cached, progress)
    require_one_label(images, f"a {model.method.title} run with one label per image")
    model, labels = model.for_labels(images)
    calibrator, tree = model.calibrator, model.tree

    def best(logits: Logits, near: Tensor | None) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
        answers = {}
        for mode, part in logits.items():
            scaled = calibrator.calibrate(part, mode)
            probabilities = scaled.softmax(dim=-1)
            top = probabilities.max(dim=-1)
            score = calibrator.score(scaled, near, mode) if scores else top.values
            for_tree = top.values if tree is None else probabilities
            answers[mode] = (top.indices, top.values, score, for_tree)
        return answers

    needs_nearness = scores and calibrator.needs_nearness
    parts, problems = model.map_logits(
        images, best, unreadable, cached, progress=progress, nearness=needs_nearness
    )
    keep = [row for row in range(len(images)) if row not in problems]
    indices, values, kept_scores, for_tree = (
        {mode: torch.cat([part[mode][column] for part in parts])[keep] for mode in model.modes}
        for column in range(4)
    )
    figures = None
    if tree is not None:
        figures = {mode: tree_figures(tree, part, labels.cpu()[keep]) for mode, part in for_tree.items()}
    groups = group_names(images)
    return Evaluation(
        model.classes,
        labels.cpu()[keep],
        indices,
        values,
        unreadable=tuple(problems[index] for index in sorted(problems)),
        groups=None if groups is None else tuple(groups[row] for row in keep),
        trained=() if isinstance(model.method, ZeroShot) else model.trained,
        scores=kept_scores if scores and model.calibration is not None else None,
        tree=figures,
    )


def _evaluate_sets(
    model: Model, images: ImageSet, unreadable: str, cached: bool, progress: Progress | None
) -> SeveralLabelsEvaluation:
    """`evaluate` of a model with several labels per image; labels of one class each are sets of one."""
    targets = targets_of(images)
    if targets is None:
        targets = torch.nn.functional.one_hot(images.labels, len(images.classes)).bool()
    columns = list(range(len(images.classes)))
    if tuple(images.classes) != model.classes:
        known = {name: number for number, name in enumerate(model.classes)}
        if all(name in known for name in images.classes):
            columns = [known[name] for name in images.classes]
        else:
            model = model.with_method(model.method.with_classes(images.classes))
    truth = torch.zeros(len(images), len(model.classes), dtype=torch.bool)
    truth[:, columns] = targets.cpu()
    calibrator = model.calibrator

    def of_batch(logits: Logits, _: Tensor | None) -> Logits:
        return {mode: calibrator.calibrate(part, mode) for mode, part in logits.items()}

    parts, problems = model.map_logits(images, of_batch, unreadable, cached, progress=progress)
    keep = [row for row in range(len(images)) if row not in problems]
    scaled = {mode: torch.cat([part[mode] for part in parts])[keep] for mode in model.modes}
    limits = None
    if model.calibration is not None:
        limits = {mode: calibrator.label_thresholds(mode) for mode in model.modes}
    return SeveralLabelsEvaluation(
        model.classes,
        truth[keep],
        {mode: part if limits is None else calibrator.probabilities(part) >= limits[mode]
         for mode, part in scaled.items()},
        {mode: calibrator.probabilities(part) for mode, part in scaled.items()} if limits else scaled,
        unreadable=tuple(problems[index] for index in sorted(problems)),
        calibrated=limits is not None,
    )  # fmt: skip
