"""How long a training will take, measured on its first batch before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dear.data.images import ImageSet
from dear.methods.base import Method
from dear.methods.frozen import Loss
from dear.train.calibrate import trial_costs
from dear.train.feed import Feed
from dear.train.frozen import views_for
from dear.train.setup.prepare import Job

WORTH_MEASURING = 20  #: steps; shorter trainings are over before a measurement would help
_MOST_REPEATED = 20.0  # seconds; a first step that takes longer is not repeated


@dataclass(frozen=True)
class Estimate:
    """Seconds that an adaptation will take on this machine."""

    training: float
    calibration: float  #: 0 where none follows


def estimate(job: Job) -> Estimate | None:
    """Estimate the time of an adaptation from its first batch; None where it has hardly any steps.

    An image and a step are computed before the clock starts, because the first ones load libraries and
    compile kernels. Nothing is updated: a run returns the same bits with and without this. On a GPU recorded
    steps may be faster than the estimate.
    """
    if job.steps < WORTH_MEASURING:
        return None
    images = len(job.images)
    rows = list(range(0, images, max(1, images // job.recipe.batch)))[: job.recipe.batch]  # of all kinds
    devices = [job.method.clip.device] if job.method.clip.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            once, step, cached = _measure_batch(job, job.images.subset(rows))
    except torch.OutOfMemoryError:
        return None  # the training raises the same error with a remedy
    total = once * images / len(rows) + step * job.steps
    if not job.spec.calibrate:
        return Estimate(total, 0.0)
    units = None if job.duplicates is None else job.duplicates.units
    share = sum(trial_costs(job.method, job.images.labels, job.recipe.seed, units))
    return Estimate(total, share * (step * job.steps if cached else total))


def _measure_batch(job: Job, first: ImageSet) -> tuple[float, float, bool]:
    """Seconds of the first batch once (files, frozen stages) and in every step; whether once is for all."""
    method, recipe = job.method.in_precision(job.recipe.precision), job.recipe
    for images in (first.subset([0]), first):
        began = time.perf_counter()
        feed, views = Feed(images, method.clip, recipe), views_for(job.method, images, recipe)
        rows = range(len(images))
        if views is None:
            pixels, labels, domains, _ = feed.at(0)
        else:
            frozen = views.training(0, rows)
        _wait(method)
        once = time.perf_counter() - began
    if views is None:
        return once, _step_seconds(method, lambda: method.loss(pixels, labels, domains)), method.quick
    began = time.perf_counter()
    views.training(1, rows)  # another view, where there are several: the images are decoded already
    _wait(method)
    once += max(0, min(views.views, recipe.epochs) - 1) * (time.perf_counter() - began)
    step = _step_seconds(method, lambda: method.loss_from_frozen(frozen, feed.labels, feed.domains))
    return once, step, True


def _step_seconds(method: Method, loss: Callable[[], Loss]) -> float:
    """Seconds of a loss with its gradients, the second time it is computed."""
    for _ in range(2):
        began = time.perf_counter()
        method.backward(loss(), lambda value: value)
        _wait(method)
        seconds = time.perf_counter() - began
        method.zero_grad(set_to_none=True)
        if seconds > _MOST_REPEATED:
            break
    return seconds


def _wait(method: Method) -> None:
    """Wait until the device is idle."""
    if method.clip.device.type == "cuda":
        torch.cuda.synchronize(method.clip.device)
