"""Calibration of a trained method by cross-validation on its own training images (method page, section 6)."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from dear._io.progress import Progress
from dear.methods.base import Method
from dear.methods.calibration import (
    Calibration,
    ModeCalibration,
    apply_scales,
    class_scales,
    confidence_score,
)
from dear.runs.evaluate import calibration_error
from dear.train.confidence import auroc, cautious_temperature, fit_bias, fit_temperature
from dear.train.crossval import HeldOut, LeftOut, Trials, class_folds, held_out, left_out, some_left_out

FOLDS = 10  #: parts of the images held out in turn for methods whose trainings take a moment
CLASS_FOLDS = 3  #: the same while half of the classes are left out
LEAST_IMAGES = 10  #: fewer held-out images say nothing about a temperature
LEAST_NEW = 4  #: classes left out in all turns; fewer say nothing about a temperature of new classes
ENOUGH_IMAGES = 80  #: of a set of which one part is enough to hold out
TOO_HIGH = 0.4  #: of log T, where trainings on about half of the images tell it (docs/answers.md)


def calibrate(
    method: Method, trials: Trials, *, folds: int | None = None, progress: Progress | None = None
) -> Calibration | None:
    """Temperatures, common scale and scores of a trained method; `method` itself is not changed.

    The method is trained again without each of `folds` parts of the images, and on each half of the classes:
    without each third of the images in turn where that takes a moment, else without one half of them. That
    makes `folds` + 1 or `folds` - 1/2 further trainings. The more folds, the closer the methods of the folds
    are to the one that was trained on all images. With `folds` = 1 there is a single training without a third
    of the images and a quarter of the classes, half as long as one on everything: fewer images then say how
    sure the answers are.

    Args:
        method: says what is trained: kind, options, classes and backbone.
        trials: what it was trained on and how.
        folds: parts of the images that are held out in turn; None: 10 for methods that are `quick`, else 1,
            or 2 where there are fewer than 80 images.
        progress: told ("calibration", percent done, 100).

    Returns:
        None where fewer than 10 images can be held out.
    """
    if folds is None:
        folds = _folds(method, trials.images.labels)
    costs = trial_costs(method, trials.images.labels, trials.recipe.seed, folds)
    if not costs:
        return None
    done = 0

    def told(step: int, steps: int) -> None:
        nonlocal done
        if progress is not None:
            share = sum(costs[:done]) + costs[min(done, len(costs) - 1)] * step / max(1, steps)
            progress("calibration", round(100 * min(1.0, share / sum(costs))), 100)
        done += step == steps

    trials = replace(trials, progress=told)
    if folds == 1:
        turn = some_left_out(method, trials)
        held, left = turn.of_trained(), [turn] if turn.new else []
    else:
        every = held_out(method, trials, folds)
        assert every is not None  # some class has two images
        parts = CLASS_FOLDS if method.quick else 2
        held, left = every, list(left_out(method, trials, parts, rotate=method.quick))
    if progress is not None:
        progress("calibration", 100, 100)
    return fit_calibration(held, left, method.open_classes, folds)


def trial_costs(method: Method, labels: Tensor, seed: int, folds: int | None = None) -> list[float]:
    """What each training of a calibration costs, as a share of training on all images; [] where none is made.

    Args:
        method: that is calibrated.
        labels: of the training images, each once.
        seed: of the recipe.
        folds: see `calibrate`.
    """
    if _holdable(method, labels) < LEAST_IMAGES:
        return []
    folds = _folds(method, labels) if folds is None else folds
    if folds == 1:
        return [0.5]
    turns = len(class_folds(len(method.classes), seed))
    more = [1 / CLASS_FOLDS] * turns * CLASS_FOLDS if method.quick else [0.25] * turns
    return [(folds - 1) / folds] * folds + more


def _holdable(method: Method, labels: Tensor) -> int:
    """Images that can be held out: the only one of a class cannot."""
    counts = torch.bincount(labels, minlength=len(method.classes))
    return int(counts[counts > 1].sum())


def _folds(method: Method, labels: Tensor) -> int:
    if method.quick:
        return FOLDS
    return 1 if _holdable(method, labels) >= ENOUGH_IMAGES else 2


def fit_calibration(held: HeldOut, left: list[LeftOut], open_classes: bool, folds: int) -> Calibration:
    """The calibration that cross-validated answers give."""
    too_high = TOO_HIGH if folds <= 2 else 0.0
    modes = {mode: _fit_mode(mode, held, left, open_classes, too_high) for mode in held.logits}
    return Calibration(images=len(held.labels), folds=folds, class_folds=len(left), modes=modes)


def _fit_mode(
    mode: str, held: HeldOut, left: list[LeftOut], open_classes: bool, too_high: float
) -> ModeCalibration:
    logits, labels = held.logits[mode], held.labels
    temperature = cautious_temperature(logits, labels, too_high=too_high)
    before, after = (_error(z, labels) for z in (logits, logits / temperature))
    own = ModeCalibration(temperature=temperature, new_temperature=temperature, joint_temperature=temperature)
    score, separation = "logit", None
    if left:
        in_turns = _temperature([turn.of_trained() for turn in left], mode) or temperature
        if open_classes:
            own = _common_scale(mode, own, fit_temperature(logits, labels), in_turns, left)
        found = {kind: _separation(mode, in_turns, left, kind) for kind in ("logit", "probability")}
        score = max(found, key=found.__getitem__)
        separation = found[score]
    scores = confidence_score(logits / temperature, score).sort().values.tolist()
    return msgspec.structs.replace(
        own,
        score=score,
        scores=tuple(round(value, 6) for value in scores),
        auroc=separation,
        ece_before=before,
        ece_after=after,
    )


def _error(logits: Tensor, labels: Tensor) -> float:
    best = logits.softmax(dim=-1).max(dim=-1)
    return min(1.0, calibration_error(best.values, best.indices == labels))


def _common_scale(
    mode: str, own: ModeCalibration, fitted: float, in_turns: float, left: list[LeftOut]
) -> ModeCalibration:
    """The scale of new classes: their temperature, and what brings them to one scale with trained ones.

    The methods of the turns learned from fewer images and classes than the one to be calibrated, so what they
    say is taken relative to `in_turns`, their own temperature for trained classes, where `fitted` is the one
    of methods that learned from all classes.

    Beside trained classes they keep the temperature of those and get one summand, chosen on classes that were
    left out, where balanced accuracy is higher with it by more than two standard errors: with few classes the
    estimates are rough. A single turn gives none: it leaves out fewer classes than it trains, which then win
    for that reason. (In one list, their own temperature lowered joint accuracy: docs/answers.md.)
    """
    new_in_turns = _temperature_of_new(mode, left) or in_turns
    plain = ModeCalibration(temperature=in_turns, joint_temperature=in_turns)
    scaled = [_scaled(mode, plain, turn) for turn in left]
    other = msgspec.structs.replace(plain, new_bias=fit_bias(*_pooled(scaled, left)))
    gain = _joint_right(mode, other, left) - _joint_right(mode, plain, left)
    helps = len(left) > 1 and float(gain.sum()) > 2 * float(gain.square().sum().sqrt())
    return msgspec.structs.replace(
        own,
        new_temperature=new_in_turns * fitted / in_turns,
        joint_temperature=own.temperature,
        new_bias=other.new_bias if helps else 0.0,
    )


def _temperature_of_new(mode: str, left: list[LeftOut]) -> float | None:
    """From images of left-out classes, answered among those; None: too few classes were left out."""
    if sum(len(turn.new) for turn in left) < LEAST_NEW:
        return None
    turns = []
    for turn in left:
        first = len(turn.trained)
        of_new = turn.labels >= first
        if len(turn.new) > 1:
            scaled = (turn.logits[mode] * turn.gamma)[of_new, first:]
            turns.append(HeldOut({mode: scaled}, turn.labels[of_new] - first, turn.rows[of_new]))
    return _temperature(turns, mode)


def _temperature(turns: list[HeldOut], mode: str) -> float | None:
    """The geometric mean over turns, weighted by their images; None: there are none."""
    turns = [turn for turn in turns if len(turn.labels)]
    if not turns:
        return None
    weights = [len(turn.labels) for turn in turns]
    logs = [math.log(fit_temperature(turn.logits[mode], turn.labels)) for turn in turns]
    return math.exp(sum(log * n for log, n in zip(logs, weights, strict=True)) / sum(weights))


def _pooled(scaled: list[Tensor], left: list[LeftOut]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, new columns and labels of all turns as one: turns stand in blocks, trained classes first."""
    old, new = (max(map(len, names)) for names in zip(*((t.trained, t.new) for t in left), strict=True))
    rows, labels = [], []
    for z, turn in zip(scaled, left, strict=True):
        first = len(turn.trained)
        wide = z.new_full((len(z), old + new), -1e4)  # classes that a turn lacks are out of the question
        wide[:, :first], wide[:, old : old + len(turn.new)] = z[:, :first], z[:, first:]
        rows.append(wide)
        labels.append(torch.where(turn.labels >= first, turn.labels - first + old, turn.labels))
    return torch.cat(rows), torch.arange(old + new) >= old, torch.cat(labels)


def _joint_right(mode: str, own: ModeCalibration, left: list[LeftOut]) -> Tensor:
    """Weight of each image that is answered rightly in one list; trained and new classes weigh the same."""
    parts = []
    for turn in left:
        right = (_scaled(mode, own, turn).argmax(dim=1) == turn.labels).double()
        of_new = turn.labels >= len(turn.trained)
        parts.append(right * torch.where(of_new, 1 / of_new.sum(), 1 / (~of_new).sum()))
    return torch.cat(parts)


def _scaled(mode: str, own: ModeCalibration, turn: LeftOut) -> Tensor:
    """Logits of a turn on the common scale, [n, C]."""
    trained = [place < len(turn.trained) for place in range(turn.logits[mode].shape[1])]
    return apply_scales(turn.logits[mode], class_scales(own, trained, turn.gamma))


def _separation(mode: str, temperature: float, left: list[LeftOut], kind: str) -> float:
    """AUROC of images of trained against images of left-out classes, answered among the trained ones."""
    found = []
    for turn in left:
        columns = len(turn.trained)
        score = confidence_score(turn.logits[mode][:, :columns] / temperature, kind)
        unknown = turn.labels >= columns
        if 0 < int(unknown.sum()) < len(unknown):
            found.append(auroc(score[~unknown], score[unknown]))
    return sum(found) / len(found) if found else 0.0
