"""`fit`: the only way to train. It draws, balances, trains, calibrates, saves and resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from dear.calibration.reference import Reference
from dear.runs.folder import add_metrics, locked, write_calibration
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.train.calibrate import calibrate
from dear.train.crossval import Trials
from dear.train.frozen import FrozenViews, shared_views, views_for
from dear.train.label_check import label_sentence, label_summary
from dear.train.loop import OnStep
from dear.train.run import Paused, train
from dear.train.setup.balance import balanced_rows
from dear.train.setup.prepare import Job, prepare
from dear.utils.files import PathLike
from dear.utils.progress import Progress

_log = logging.getLogger("dear")


def fit(
    job: Job | Spec,
    out: PathLike | None = None,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    log: OnStep | None = None,
    stop: Callable[[], bool] | None = None,
) -> Model:
    """Train as a Spec describes.

    Args:
        job: a Spec, or the `Job` that `prepare` returned for one.
        out: run folder; None keeps the result in memory.
        resume: continue an interrupted run in `out`.
        progress: called with (stage, done, total).
        log: called after every step with steps done, steps in all and the last line of the training log.
        stop: called after every step; True stops.

    Raises:
        DearError: anything a user can correct.
        Paused: stopped by Ctrl-C or `stop`; the folder can be resumed.
    """
    if isinstance(job, Spec):
        job = prepare(job, progress=progress)

    def step(done: int, steps: int, line: Mapping[str, float | int]) -> None:
        if progress is not None:
            progress("training", done, steps)
        if log is not None:
            log(done, steps, line)

    images, rows = job.training_set
    repeats = rows != list(range(len(images)))
    views, units = views_for(job.method, images, job.recipe, progress), job.units
    trained = train(
        job.method,
        images.subset(rows) if repeats else images,
        job.recipe,
        out,
        resume,
        step,
        stop,
        spec=job.spec,
        views=views.subset(rows) if views is not None and repeats else views,
        units=None if units is None else units[rows],
    )
    facts = {} if job.duplicates is None else {"duplicates": job.duplicates.to_dict()}
    if job.pool is not None:
        facts["unlabeled"] = job.pool.to_dict()
    if facts:
        trained.metrics.update(facts)
        if trained.path is not None:
            with locked(trained.path):
                add_metrics(trained.path, **facts)
    if job.spec.calibrate and trained.calibration is None:
        if views is not None and images is not job.images:  # copies would reveal the held-out images
            views = views.subset(range(len(job.base)))
        _calibrate(trained, job, views, progress, stop)
    return trained


def trials_of(job: Job, views: FrozenViews | None, stop: Callable[[], bool] | None = None) -> Trials:
    """The settings of cross-validation: trainings as by `fit`, on parts of the job's images."""
    repeated = balanced_rows if job.spec.balance else None
    return Trials(
        job.images, job.recipe, views, repeated, stop=stop, duplicates=job.duplicates, teacher=job.teacher
    )


def _features(trained: Model, job: Job, views: FrozenViews | None) -> Tensor:
    """Frozen features [n, E] of the training images, in the precision of answers."""
    if views is None or views.method.clip is not trained.bound.clip:
        return trained.features(job.images)
    return views.features(None, range(len(job.images))).x


def _calibrate(
    trained: Model,
    job: Job,
    views: FrozenViews | None,
    progress: Progress | None,
    stop: Callable[[], bool] | None,
) -> None:
    """Calibrate a trained method on its training images, and write the result to the run folder.

    With too few images to hold out, it logs a notice. If the user stops it, the run is complete without a
    calibration; resuming it calibrates again.
    """
    method = trained.method
    views = shared_views(method, job.base, job.recipe) if views is None else views
    try:
        features = _features(trained, job, views)
        calibration = calibrate(method, trials_of(job, views, stop), features=features, progress=progress)
    except Paused:
        _log.warning("notice: the calibration was stopped; the run is complete without it")
        return
    if calibration is None:
        _log.warning(
            "notice: %s: too few images for a calibration, so probabilities keep CLIP's temperature and "
            "images of no class cannot be rejected; it needs 10 images of classes that have two or more",
            job.images.name,
        )
        return
    trained.calibration = calibration
    units = None if job.duplicates is None else job.duplicates.units
    contents = None if job.duplicates is None else job.duplicates.contents
    trained.reference = Reference.of(features, job.images.labels, units, contents)
    if method.several:  # wrong labels are searched only with one label per image
        if trained.path is not None:
            with locked(trained.path):
                write_calibration(trained.path, trained.calibration, trained.reference)
        return
    labels = label_summary(job.images, features, units)
    trained.metrics["labels"] = labels
    if trained.path is not None:
        with locked(trained.path):
            write_calibration(trained.path, trained.calibration, trained.reference)
            add_metrics(trained.path, labels=labels)
    sentence = label_sentence(labels)
    if sentence:
        _log.warning("notice: %s", sentence)
