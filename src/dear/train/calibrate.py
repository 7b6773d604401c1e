"""Calibration of a trained method by cross-validation on its own training images (method page, section 6)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import msgspec
import torch
from torch import Tensor

from dear.calibration.calibration import Calibration, ModeCalibration, combine_scores, standardize
from dear.calibration.reference import draw_reference, held_out_nearness
from dear.calibration.several_labels import best_thresholds, fit_sigmoids
from dear.calibration.temperature import CAUTION, auroc, cautious_temperature, fit_temperature
from dear.data.duplicates import Duplicates, find_duplicates
from dear.data.folds import IntArray, equal_rows
from dear.data.images import targets_of
from dear.methods.base import Method
from dear.runs.evaluation import calibration_error
from dear.train.crossval import (
    HeldOut,
    HeldOutClasses,
    Trials,
    class_folds,
    concat_folds,
    iter_folds,
    predict_held_out_classes,
    predict_some_held_out_classes,
)
from dear.utils.progress import Progress

FOLDS = 10  #: parts of the images held out in turn for quick methods
SLOW_FOLDS = 3  #: the same for other methods
CLASS_FOLDS = 3  #: parts of the images held out in turn while half of the classes are held out
LEAST_IMAGES = 10  #: held-out images that a temperature needs
LEAST_NEW = 4  #: classes held out in all trainings that a temperature of new classes needs
ENOUGH_IMAGES = 80  #: from this size of a set on, a slow method holds out only the first fold
#: log T fitted on methods that learned from two thirds of the images is higher by this much (docs/answers.md)
TWO_THIRDS_BIAS = 0.1
TOWER_CAUTION = 1.0  #: standard errors toward 1 for methods that train inside the tower


def calibrate(
    method: Method, trials: Trials, *, features: Tensor | None = None, progress: Progress | None = None
) -> Calibration | None:
    """Temperatures and scores of a trained method; `method` itself is not changed.

    Temperature and scores of trained classes come from images that were held out of trainings on all classes,
    those of new classes from classes that were held out. A quick method is trained again without each tenth
    of the images and, on each half of the classes, without each third. A slow one is trained without a third
    of the images (without each third in turn, where there are fewer than 80), and without a quarter of the
    classes: 1.2 trainings as long as one on everything, 2.5 for small sets.

    Args:
        method: the trained method.
        trials: its training images and settings.
        features: frozen features [n, E] of the training images; None: images of no class are detected by
            their logits alone.
        progress: called with ("calibration", percent done, 100).

    Returns:
        None if fewer than 10 images can be held out.
    """
    labels = trials.images.labels
    if trials.duplicates is None:
        trials = replace(trials, duplicates=find_duplicates(trials.images))
    assert trials.duplicates is not None
    units = trials.duplicates.units
    costs = trial_costs(method, labels, trials.recipe.seed, units)
    if not costs:
        return None
    done = 0

    def step(number: int, steps: int) -> None:
        nonlocal done
        if progress is not None:
            share = sum(costs[:done]) + costs[min(done, len(costs) - 1)] * number / max(1, steps)
            progress("calibration", round(100 * min(1.0, share / sum(costs))), 100)
        done += number == steps

    trials = replace(trials, progress=step)
    folds, parts = calibration_folds(method, labels, units)
    held_out = concat_folds(list(islice(iter_folds(method, trials, folds), parts)))
    if method.several:
        return fit_several_labels(held_out, targets_of(trials.images), parts)
    if method.quick:
        without_classes = list(predict_held_out_classes(method, trials, CLASS_FOLDS, rotate=True))
    else:
        without_classes = [predict_some_held_out_classes(method, trials)] if len(method.classes) > 2 else []
    if progress is not None:
        progress("calibration", 100, 100)
    calibration = fit_calibration(held_out, without_classes, method.open_classes, parts)
    if features is None:
        return calibration
    return with_nearness(
        calibration,
        held_out,
        without_classes,
        features.cpu(),
        labels.cpu(),
        method.classes,
        trials.duplicates,
    )


def trial_costs(method: Method, labels: Tensor, seed: int, units: IntArray | None = None) -> list[float]:
    """The cost of each training of a calibration relative to training on all images; [] if there is none.

    `labels` are those of the training images, each once, `seed` is the recipe's; `units` [n]: copies of an
    image have the same. None: there are no copies.
    """
    if _count_holdable(method, labels, units) < LEAST_IMAGES:
        return []
    folds, parts = calibration_folds(method, labels, units)
    costs = [(folds - 1) / folds] * parts
    if method.several:
        return costs
    if method.quick:
        return costs + [1 / CLASS_FOLDS] * CLASS_FOLDS * len(class_folds(method.classes, seed))
    return costs + [0.5] * (len(method.classes) > 2)


def _count_holdable(method: Method, labels: Tensor, units: IntArray | None) -> int:
    """Number of images that can be held out, copies counted once; the only image of a class cannot."""
    numbers = torch.arange(len(labels)) if units is None else torch.from_numpy(units)
    distinct = torch.stack([labels.cpu(), numbers]).unique(dim=1)[0]
    counts = torch.bincount(distinct, minlength=len(method.classes))
    return int(counts[counts > 1].sum())


def calibration_folds(method: Method, labels: Tensor, units: IntArray | None = None) -> tuple[int, int]:
    """Parts of the images, and how many of them are held out in turn; see `trial_costs`."""
    if method.quick:
        return FOLDS, FOLDS
    return SLOW_FOLDS, 1 if _count_holdable(method, labels, units) >= ENOUGH_IMAGES else SLOW_FOLDS


def fit_calibration(
    held_out: HeldOut, without_classes: list[HeldOutClasses], open_classes: bool, folds: int
) -> Calibration:
    """The calibration from cross-validated logits."""
    bias = 0.0 if folds >= FOLDS else TWO_THIRDS_BIAS
    modes = {mode: _fit_mode(mode, held_out, without_classes, open_classes, bias) for mode in held_out.logits}
    return Calibration(
        images=len(held_out.labels), folds=folds, class_folds=len(without_classes), modes=modes
    )


def fit_several_labels(held_out: HeldOut, targets: Tensor | None, folds: int) -> Calibration:
    """The calibration of several labels (bool [n, C] of all images) from cross-validated logits."""
    assert targets is not None
    truth = targets[held_out.rows]
    modes = {}
    for mode, logits in held_out.logits.items():
        temperature, biases = fit_sigmoids(logits, truth)
        probabilities = (logits.double() / temperature + biases).sigmoid()
        # [n, C] -> [n C]
        confidence = torch.maximum(probabilities, 1 - probabilities).flatten()
        correct = ((probabilities >= 0.5) == truth).flatten()
        modes[mode] = ModeCalibration(
            temperature=temperature,
            ece_after=min(1.0, calibration_error(confidence, correct)),
            biases=_rounded(biases),
            thresholds=_rounded(best_thresholds(probabilities, truth)),
        )
    return Calibration(images=len(truth), folds=folds, modes=modes)


def _fit_mode(
    mode: str, held_out: HeldOut, without_classes: list[HeldOutClasses], open_classes: bool, bias: float
) -> ModeCalibration:
    logits, labels = held_out.logits[mode], held_out.labels
    temperature = cautious_temperature(logits, labels, bias, TOWER_CAUTION if bias else CAUTION)
    before, after = (_error(z, labels) for z in (logits, logits / temperature))
    new_temperature = temperature
    if without_classes and open_classes:
        # These methods were trained on fewer images and classes than the one to calibrate, so their
        # temperature of new classes counts relative to their temperature of trained ones.
        of_trained = _temperature([part.of_trained() for part in without_classes], mode) or temperature
        of_new = _temperature_of_new(mode, without_classes) or of_trained
        new_temperature = of_new * fit_temperature(logits, labels) / of_trained
    return ModeCalibration(
        temperature=temperature,
        new_temperature=new_temperature,
        logits=_rounded((logits / temperature).amax(dim=-1)),
        auroc=_separation(mode, without_classes),
        ece_before=before,
        ece_after=after,
    )


def with_nearness(
    calibration: Calibration,
    held_out: HeldOut,
    without_classes: list[HeldOutClasses],
    features: Tensor,
    labels: Tensor,
    classes: tuple[str, ...],
    duplicates: Duplicates | None = None,
) -> Calibration:
    """The calibration with the nearness of held-out images to the other training images.

    `features` [n, E] and `labels` [n] are those of all training images, `classes` the names of the labels.
    Without `duplicates`, images with equal features are copies.
    """
    if duplicates is None:
        duplicates = Duplicates(
            equal_rows(features), tuple(str(index).encode() for index in range(len(labels)))
        )
    units = duplicates.units
    reference_rows = draw_reference(labels, units, duplicates.contents)
    nearness = held_out_nearness(features, reference_rows, held_out.rows, units)
    nearness_without = []
    for part in without_classes:
        known = torch.tensor([classes.index(name) for name in part.trained])
        of_known = torch.isin(labels, known).nonzero()[:, 0]
        copies = duplicates.subset(of_known.tolist())
        reference_rows = of_known[draw_reference(labels[of_known], copies.units, copies.contents)]
        nearness_without.append(held_out_nearness(features, reference_rows, part.rows, units))
    modes = {
        name: msgspec.structs.replace(mode, auroc=_separation(name, without_classes, nearness_without))
        for name, mode in calibration.modes.items()
    }
    return msgspec.structs.replace(calibration, nearness=_rounded(nearness), modes=modes)


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(round(value, 8) for value in values.double().tolist())


def _error(logits: Tensor, labels: Tensor) -> float:
    best = logits.softmax(dim=-1).max(dim=-1)
    return min(1.0, calibration_error(best.values, best.indices == labels))


def _temperature_of_new(mode: str, without_classes: list[HeldOutClasses]) -> float | None:
    """From images of held-out classes, predicted among those; None: too few classes were held out."""
    if sum(len(part.new) for part in without_classes) < LEAST_NEW:
        return None
    of_new: list[HeldOut] = []
    for part in without_classes:
        first = len(part.trained)
        new = part.labels >= first
        if len(part.new) > 1:
            logits = part.logits[mode][new, first:]
            of_new.append(HeldOut({mode: logits}, part.labels[new] - first, part.rows[new]))
    return _temperature(of_new, mode)


def _temperature(parts: list[HeldOut], mode: str) -> float | None:
    """The geometric mean over parts, weighted by their numbers of images; None: there are none."""
    parts = [part for part in parts if len(part.labels)]
    if not parts:
        return None
    weights = [len(part.labels) for part in parts]
    logs = [math.log(fit_temperature(part.logits[mode], part.labels)) for part in parts]
    return math.exp(sum(log * n for log, n in zip(logs, weights, strict=True)) / sum(weights))


def _separation(
    mode: str, without_classes: list[HeldOutClasses], nearness: list[Tensor] | None = None
) -> float | None:
    """AUROC of images of trained against images of held-out classes, predicted among the trained ones.

    It is computed per method and averaged, because their scores differ in scale.
    """
    values = []
    for number, part in enumerate(without_classes):
        columns = len(part.trained)
        unknown = part.labels >= columns
        if not 0 < int(unknown.sum()) < len(unknown):
            continue
        largest = part.logits[mode][:, :columns].amax(dim=-1).double()
        nearness_of_part = (
            None if nearness is None else standardize(nearness[number].double(), nearness[number][~unknown])
        )
        score = combine_scores(standardize(largest, largest[~unknown]), nearness_of_part)
        values.append(auroc(score[~unknown], score[unknown]))
    return sum(values) / len(values) if values else None
