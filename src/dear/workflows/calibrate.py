"""The calibration that follows a training: kept in the method and in its run folder."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dear._io.progress import Progress
from dear.runs.folder import locked, write_calibration
from dear.train.balance import balanced_rows
from dear.train.calibrate import calibrate
from dear.train.crossval import Trials
from dear.train.frozen import stages_of
from dear.train.run import Paused, Trained
from dear.workflows.plan import Plan

VIEWS = 4  #: random views per image that the trainings of a calibration share

_log = logging.getLogger("dear")


def calibrate_run(
    trained: Trained,
    plan: Plan,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Calibrate a trained method on its training images; the run folder gets a `calibration.json`.

    Where too few images can be held out, a notice says so. Stopped by the user, the run stays as it is;
    resuming it calibrates again.
    """
    images = plan.distinct
    stages = stages_of(trained.method, images, plan.recipe, VIEWS)
    trials = Trials(images, plan.recipe, stages, balanced_rows if plan.balance else None, stop=stop)
    try:
        found = calibrate(trained.method, trials, progress=progress)
    except Paused:
        _log.warning("dear: the calibration was stopped; the run is complete without it")
        return
    if found is None:
        _log.warning(
            "dear: %s: too few images to hold some out, so probabilities stay on CLIP's own scale and no "
            "threshold for images of no class is known; 10 images of classes with two or more are needed",
            images.name,
        )
        return
    trained.method.calibration = found
    if trained.path is not None:
        with locked(trained.path):
            write_calibration(trained.path, found)
