"""Training on a user's own images: `dear adapt`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from dear._io.files import PathLike
from dear._io.progress import Progress
from dear.data.images import ImageSet
from dear.runs.feature_cache import frozen_features
from dear.runs.folder import check_folder
from dear.train.run import Trained, train
from dear.workflows.calibrate import calibrate_run
from dear.workflows.options import AdaptOptions
from dear.workflows.plan import Plan, plan_adaptation

LogLine = Callable[[int, int, Mapping[str, float | int]], None]
"""Called after every step with the steps done, the steps in all and the last line of the training log."""

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
    """Adapt a backbone to the user's own images.

    Args:
        data: what `open_data` takes (its training split is used), or an image set.
        out: run folder; None keeps the result in memory.
        settings: how to adapt; None: the defaults of `AdaptOptions`.
        resume: continue an interrupted run in `out`.
        progress: told about each stage of the work.
        stop: asked after every step; True stops.
        changes: fields of `AdaptOptions` by name, instead of those in `settings`.

    Raises:
        DearError: anything a user can correct, in one sentence.

    Example:
        >>> adapt("photos/", "run", method="dear", shots=16, recipe={"epochs": 5})   # doctest: +SKIP
    """
    if out is not None:
        check_folder(out, resume)
    plan = plan_adaptation(data, (settings or AdaptOptions()).changed(**changes), progress)
    for notice in plan.notices:
        _log.warning("dear: %s", notice)
    return run_plan(plan, out, resume=resume, progress=progress, stop=stop)


def run_plan(
    plan: Plan,
    out: PathLike | None = None,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    log: LogLine | None = None,
    stop: Callable[[], bool] | None = None,
) -> Trained:
    """Train as planned; `log` gets every line of the training log, the rest is as in `adapt`."""

    def told(step: int, steps: int, line: Mapping[str, float | int]) -> None:
        if progress is not None:
            progress("training", step, steps)
        if log is not None:
            log(step, steps, line)

    features = None
    if plan.method.reads_feature and not plan.recipe.augment:
        features = frozen_features(plan.method, plan.images, plan.recipe.precision, progress)
    trained = train(
        plan.method, plan.images, plan.recipe, out, resume, told, stop, preset=plan.preset, features=features
    )
    if plan.calibrate and trained.method.calibration is None:
        calibrate_run(trained, plan, progress, stop)
    return trained
