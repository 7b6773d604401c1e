"""Calibration of a trained method by cross-validation on its own training images (method page, section 6)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import msgspec
import torch
from torch import Tensor

from dear.calibration.reference import drawn, held_out_nearness
from dear.calibration.scales import Calibration, ModeCalibration, combined, standard
from dear.calibration.temperature import CAUTION, auroc, cautious_temperature, fit_temperature
from dear.data.duplicates import find_duplicates
from dear.data.folds import Places, equal_rows
from dear.methods.base import Method
from dear.runs.evaluate import calibration_error
from dear.train.crossval import (
    HeldOut,
    HeldOutClasses,
    Trials,
    class_folds,
    classes_held_out,
    held_parts,
    joined,
    some_classes_held_out,
)
from dear.utils.progress import Progress

FOLDS = 10  #: parts of the images held out in turn for methods whose trainings take a moment
SLOW_FOLDS = 3  #: for others
CLASS_FOLDS = 3  #: parts of the images held out in turn while half of the classes are held out
LEAST_IMAGES = 10  #: fewer held-out images say nothing about a temperature
LEAST_NEW = 4  #: classes held out in all turns; fewer say nothing about a temperature of new classes
ENOUGH_IMAGES = 80  #: in a set of which a slow method holds out the first part alone
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
        method: says what is trained: kind, options, classes and backbone.
        trials: what it was trained on and how.
        features: frozen features [n, E] of the training images; None: images of no class are told by their
            logits alone.
        progress: called with ("calibration", percent done, 100).

    Returns:
        None where fewer than 10 images can be held out.
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
    held = joined(list(islice(held_parts(method, trials, folds), parts)))
    if method.quick:
        left = list(classes_held_out(method, trials, CLASS_FOLDS, rotate=True))
    else:
        left = [some_classes_held_out(method, trials)] if len(method.classes) > 2 else []
    if progress is not None:
        progress("calibration", 100, 100)
    found = fit_calibration(held, left, method.open_classes, parts)
    if features is None:
        return found
    return with_nearness(found, held, left, features.cpu(), labels.cpu(), method.classes, units)


def trial_costs(method: Method, labels: Tensor, seed: int, units: Places | None = None) -> list[float]:
    """What each training of a calibration costs, as a share of training on all images; [] where none is made.

    `labels` are those of the training images, each once, `seed` is the recipe's; `units` [n]: copies of an
    image have the same. None: there are no copies.
    """
    if _holdable(method, labels, units) < LEAST_IMAGES:
        return []
    folds, parts = calibration_folds(method, labels, units)
    costs = [(folds - 1) / folds] * parts
    if method.quick:
        return costs + [1 / CLASS_FOLDS] * CLASS_FOLDS * len(class_folds(len(method.classes), seed))
    return costs + [0.5] * (len(method.classes) > 2)


def _holdable(method: Method, labels: Tensor, units: Places | None) -> int:
    """Images that can be held out, copies counted once: the only one of a class cannot."""
    numbers = torch.arange(len(labels)) if units is None else torch.from_numpy(units)
    distinct = torch.stack([labels.cpu(), numbers]).unique(dim=1)[0]
    counts = torch.bincount(distinct, minlength=len(method.classes))
    return int(counts[counts > 1].sum())


def calibration_folds(method: Method, labels: Tensor, units: Places | None = None) -> tuple[int, int]:
    """Parts of the images, and how many of them are held out in turn; see `trial_costs`."""
    if method.quick:
        return FOLDS, FOLDS
    return SLOW_FOLDS, 1 if _holdable(method, labels, units) >= ENOUGH_IMAGES else SLOW_FOLDS


def fit_calibration(held: HeldOut, left: list[HeldOutClasses], open_classes: bool, folds: int) -> Calibration:
    """The calibration that cross-validated answers give."""
    bias = 0.0 if folds >= FOLDS else TWO_THIRDS_BIAS
    modes = {mode: _fit_mode(mode, held, left, open_classes, bias) for mode in held.logits}
    return Calibration(images=len(held.labels), folds=folds, class_folds=len(left), modes=modes)


def _fit_mode(
    mode: str, held: HeldOut, left: list[HeldOutClasses], open_classes: bool, bias: float
) -> ModeCalibration:
    logits, labels = held.logits[mode], held.labels
    temperature = cautious_temperature(logits, labels, bias, TOWER_CAUTION if bias else CAUTION)
    before, after = (_error(z, labels) for z in (logits, logits / temperature))
    new_temperature = temperature
    if left and open_classes:
        # The methods of the turns learned from fewer images and classes than the one to be calibrated, so
        # what they say of new classes is taken relative to their own temperature of trained ones.
        in_turns = _temperature([turn.of_trained() for turn in left], mode) or temperature
        new_in_turns = _temperature_of_new(mode, left) or in_turns
        new_temperature = new_in_turns * fit_temperature(logits, labels) / in_turns
    return ModeCalibration(
        temperature=temperature,
        new_temperature=new_temperature,
        logits=_rounded((logits / temperature).amax(dim=-1)),
        auroc=_separation(mode, left),
        ece_before=before,
        ece_after=after,
    )


def with_nearness(
    found: Calibration,
    held: HeldOut,
    left: list[HeldOutClasses],
    features: Tensor,
    labels: Tensor,
    classes: tuple[str, ...],
    units: Places | None = None,
) -> Calibration:
    """The calibration with how near held-out images are to the others.

    `features` [n, E] and `labels` [n] are those of all training images, `classes` the names of the labels;
    `units` [n]: copies of an image have the same. None: images with equal features are copies.
    """
    units = equal_rows(features) if units is None else units
    nearness = held_out_nearness(features, drawn(labels, units), held.rows, units)
    turns = []
    for turn in left:
        known = torch.tensor([classes.index(name) for name in turn.trained])
        of_known = torch.isin(labels, known).nonzero()[:, 0]
        kept = of_known[drawn(labels[of_known], units[of_known.numpy()])]
        turns.append(held_out_nearness(features, kept, turn.rows, units))
    modes = {
        mode: msgspec.structs.replace(own, auroc=_separation(mode, left, turns))
        for mode, own in found.modes.items()
    }
    return msgspec.structs.replace(found, nearness=_rounded(nearness), modes=modes)


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(round(value, 8) for value in values.double().tolist())


def _error(logits: Tensor, labels: Tensor) -> float:
    best = logits.softmax(dim=-1).max(dim=-1)
    return min(1.0, calibration_error(best.values, best.indices == labels))


def _temperature_of_new(mode: str, left: list[HeldOutClasses]) -> float | None:
    """From images of left-out classes, answered among those; None: too few classes were left out."""
    if sum(len(turn.new) for turn in left) < LEAST_NEW:
        return None
    turns = []
    for turn in left:
        first = len(turn.trained)
        of_new = turn.labels >= first
        if len(turn.new) > 1:
            logits = turn.logits[mode][of_new, first:]
            turns.append(HeldOut({mode: logits}, turn.labels[of_new] - first, turn.rows[of_new]))
    return _temperature(turns, mode)


def _temperature(turns: list[HeldOut], mode: str) -> float | None:
    """The geometric mean over turns, weighted by their images; None: there are none."""
    turns = [turn for turn in turns if len(turn.labels)]
    if not turns:
        return None
    weights = [len(turn.labels) for turn in turns]
    logs = [math.log(fit_temperature(turn.logits[mode], turn.labels)) for turn in turns]
    return math.exp(sum(log * n for log, n in zip(logs, weights, strict=True)) / sum(weights))


def _separation(mode: str, left: list[HeldOutClasses], nearness: list[Tensor] | None = None) -> float | None:
    """AUROC of images of trained against images of left-out classes, answered among the trained ones.

    The methods of the turns differ in scale, and so each is judged by itself.
    """
    found = []
    for place, turn in enumerate(left):
        columns = len(turn.trained)
        unknown = turn.labels >= columns
        if not 0 < int(unknown.sum()) < len(unknown):
            continue
        largest = turn.logits[mode][:, :columns].amax(dim=-1).double()
        near = None if nearness is None else standard(nearness[place].double(), nearness[place][~unknown])
        score = combined(standard(largest, largest[~unknown]), near)
        found.append(auroc(score[~unknown], score[unknown]))
    return sum(found) / len(found) if found else None
