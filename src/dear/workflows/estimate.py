"""How long a planned adaptation will take, measured on its first batch before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dear.data.images import ImageSet
from dear.methods.base import Loss, Method, in_precision
from dear.runs.feature_cache import frozen_features
from dear.train.calibrate import trial_costs
from dear.train.feed import Feed
from dear.workflows.plan import Plan

WORTH_MEASURING = 20  #: steps; shorter trainings are over before a measurement would help
_WARM = 2.0  # seconds: where the first step is slower than that, its own time is taken


@dataclass(frozen=True)
class Estimate:
    """Seconds that an adaptation will take on this machine."""

    training: float
    calibration: float  #: 0 where none follows


def estimate(plan: Plan) -> Estimate | None:
    """Estimate the time of an adaptation from its first batch; None where it has hardly any steps.

    One or two steps are computed without an update: nothing that is learned changes, and a run gives the same
    bits with and without this. On a GPU recorded steps may be faster than the estimate.
    """
    if plan.steps < WORTH_MEASURING:
        return None
    images = len(plan.distinct)
    rows = list(range(0, images, max(1, images // plan.recipe.batch)))[: plan.recipe.batch]  # of all kinds
    devices = [plan.method.clip.device] if plan.method.clip.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            once, step = _measured(plan, plan.distinct.subset(rows))
    except torch.OutOfMemoryError:
        return None  # the error of the training says what to do
    whole = once * images / len(rows) + step * plan.steps
    if not plan.calibrate:
        return Estimate(whole, 0.0)
    kept = plan.method.quick or (plan.method.reads_feature and not plan.recipe.augment)  # once for all
    share = sum(trial_costs(plan.method, plan.distinct.labels, plan.recipe.seed))
    return Estimate(whole, share * (step * plan.steps if kept else whole))


def _measured(plan: Plan, first: ImageSet) -> tuple[float, float]:
    """Seconds that the first batch takes once (files, kept frozen stages), and in every step."""
    method, recipe = in_precision(plan.method, plan.recipe.precision), plan.recipe
    began = time.perf_counter()
    feed = Feed(first, method.clip, recipe)
    if method.reads_feature and not recipe.augment:
        frozen = (frozen_features(plan.method, first, recipe.precision).to(feed.device),)
        once = time.perf_counter() - began
        return once, _step_seconds(method, lambda: method.loss_from_frozen(frozen, feed.labels, feed.domains))
    batch = feed.at(0)
    once = time.perf_counter() - began
    if not recipe.views:
        return once, _step_seconds(method, lambda: method.loss(*batch))
    began = time.perf_counter()
    with torch.no_grad():
        kept = method.frozen_stage(batch.pixels)
    _wait(method)
    once += min(recipe.views, recipe.epochs) * (time.perf_counter() - began)
    return once, _step_seconds(method, lambda: method.loss_from_frozen(kept, batch.labels, batch.domains))


def _step_seconds(method: Method, loss: Callable[[], Loss]) -> float:
    """Seconds of a loss with its gradients; the second time it is computed, unless the first took long."""
    for _ in range(2):
        began = time.perf_counter()
        method.backward(loss(), lambda value: value)
        _wait(method)
        spent = time.perf_counter() - began
        method.zero_grad(set_to_none=True)
        if spent > _WARM:
            break
    return spent


def _wait(method: Method) -> None:
    """Wait until the device is idle."""
    if method.clip.device.type == "cuda":
        torch.cuda.synchronize(method.clip.device)
