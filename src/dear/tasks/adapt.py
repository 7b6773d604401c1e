"""Training on labeled images: `dear adapt`, `dear.adapt`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dear.clip.model import Clip
from dear.data.images import ImageSet, unlabeled_images
from dear.data.inputs import as_images, is_frame
from dear.data.open import open_data
from dear.data.texts import read_texts
from dear.data.tree import read_tree
from dear.data.unlabeled import REST
from dear.errors import DiskError, UsageError
from dear.heads.roles import RoleMap
from dear.methods import find_method
from dear.runs.folder import add_metrics, check_folder
from dear.runs.model import Model
from dear.runs.recipe import parse_recipe
from dear.runs.spec import Spec
from dear.shortcuts.without import Without
from dear.tasks.evaluate import held_out_accuracy, open_held_out
from dear.train.fit import fit
from dear.train.setup.estimate import estimate
from dear.train.setup.prepare import Job, check_held_out, open_training, prepare
from dear.train.trackers import Tracker, tracked_steps
from dear.utils.files import PathLike
from dear.utils.pairs import parse_pairs
from dear.utils.progress import Progress
from dear.utils.text import format_count, format_duration

HELD_OUT = "evaluation of {} (held out)"  #: key of the accuracy in the metrics of a run
_log = logging.getLogger("dear")


def adapt(
    data: PathLike | ImageSet | Any,
    out: PathLike | None = None,
    *,
    method: str = "dear",
    backbone: PathLike | Clip = "mini",
    roles: PathLike | RoleMap | None = None,
    allow_other_roles: bool = False,
    shots: int | None = None,
    seed: int = 1,
    epochs: int | None = None,
    batch: int | None = None,
    options: Mapping[str, Any] | Sequence[str] | None = None,
    recipe: str | Mapping[str, Any] | Sequence[str] | None = None,
    balance: bool = True,
    unlabeled: PathLike | ImageSet | Any | None = None,
    unlabeled_weight: float | None = None,
    unreadable: str = "stop",
    without: str | Sequence[str] | Without | None = None,
    way: str = "auto",
    examples: PathLike | Mapping[str, PathLike] | Sequence[str] | None = None,
    focus: str | None = None,
    calibrate: bool = True,
    data_root: PathLike | None = None,
    margin: float = 0.0,
    template: str | None = None,
    texts: PathLike | Mapping[str, Any] | None = None,
    tree: PathLike | Mapping[str, Any] | None = None,
    resume: bool = False,
    check: bool = True,
    log: str | None = None,
    device: str = "auto",
    mode: str | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Model:
    """Adapt a backbone to labeled images, a few per class.

    The plan, the estimated time, and the notices are written to the logger "dear".

    Args:
        data: what `open_data` takes (its training split is used), or an image set.
        out: run folder; None keeps the result in memory.
        method: name of the method; see `list_methods`.
        backbone: what `load` takes, or a loaded backbone.
        roles: role map or its file, for methods that use roles; None: the backbone's, or discovered.
        allow_other_roles: accept a role map that was made on other weights.
        shots: images per class to train on; None or 0: all.
        seed: of the draw of images and of training.
        epochs: passes over the images; None: the method's value.
        batch: images per step; None: the method's value.
        options: of the method, by name.
        recipe: a preset of the method ("strong"), values of the recipe by name ({"lr": 1e-4}), or a list of
            both as on the command line (["strong", "lr=1e-4"]).
        balance: repeat images of rare classes.
        unlabeled: images without labels to learn from as well: a folder, a table with a column `path`, a
            dataset, an image set, or "rest" for the training images that `shots` leave out. They are used
            unless cross-validation shows that they harm (`dear.train.setup.unlabeled`).
        unlabeled_weight: of an unlabeled image relative to a labeled one, from 0 (not used) to 1, instead of
            that decision.
        unreadable: "stop" refuses images that cannot be read, "skip" leaves them out.
        without: concepts or image properties to remove before training ("location", "location,color").
        way: how they are removed ("words", "heads", …); "auto" chooses on the training images.
        examples: images that show the values of the concept to remove, one folder per value; for several
            concepts a mapping from concept to folder.
        focus: role whose heads to learn with in addition to the whole feature ("location"), or "auto".
        calibrate: fit probabilities and the threshold for rejection by cross-validation after training.
        data_root: folder of the benchmarks, for the name of a benchmark.
        margin: added to every box of the data on each side, as a fraction of the box.
        template: prompt with `{}` for the class; None: the dataset's.
        texts: several texts per class, averaged: a JSON file or a mapping `{class: [sentence, …]}`; None: the
            column `texts` of the data where it has one (`dear.data.texts`).
        tree: a tree of the classes, by which answers are read: a JSON file or a mapping, nested or from child
            to parent; None: the column `parent` of the data where it has one (`dear.data.tree`).
        resume: continue an interrupted run in `out`.
        check: measure accuracy on held-out images before and after, where `data` has any.
        log: also log to tensorboard:FOLDER, mlflow:FOLDER, wandb:PROJECT, or trackio:PROJECT.
        device: "auto", "cpu", "cuda", …
        mode: how the result will predict; checked before training.
        progress: called with (stage, done, total).
        stop: called after every step; True stops.

    Returns:
        The trained model. `metrics` holds steps, seconds, and the accuracy on held-out images.

    Raises:
        DearError: anything a user can correct.

    Example:
        >>> run = adapt("world:textures", method="linear-probe", shots=2, calibrate=False, check=False)
        >>> len(run.classes)
        12
    """
    source, held_out = data, None
    if is_frame(data):
        source, held_out = "frame", open_held_out(data, data_root, margin)
        data = open_data(data, "train", root=data_root, template=template, margin=margin)
    if is_frame(unlabeled):
        unlabeled = unlabeled_images(as_images(unlabeled))
    if epochs is not None and epochs < 1:
        raise UsageError(f"epochs must be at least 1, got {epochs}")
    if roles is not None and not isinstance(roles, RoleMap):
        _check_roles_used(method, without, focus)
    if without is None and (examples is not None or way != "auto"):
        raise UsageError("way and examples need without, the concept or property to remove")
    removal = None if not without else Without.of(without, way, examples)
    preset, values = parse_recipe(recipe, epochs=epochs, batch=batch)
    spec = Spec().changed(
        data=None if isinstance(data, ImageSet) else data,
        method=method,
        backbone=None if isinstance(backbone, Clip) else backbone,
        roles=None if isinstance(roles, RoleMap) else roles,
        allow_other_roles=allow_other_roles,
        shots=shots,
        seed=seed,
        template=template,
        texts=None if texts is None else read_texts(texts),
        tree=None if tree is None else read_tree(tree),
        root=data_root,
        margin=margin,
        recipe=values,
        preset=preset,
        options=parse_pairs(options, "options"),
        balance=balance,
        unlabeled=None if isinstance(unlabeled, ImageSet) else unlabeled,
        unlabeled_weight=unlabeled_weight,
        unreadable=unreadable,
        calibrate=calibrate,
        focus=focus,
    )
    if out is not None:
        check_folder(out, resume)
    if log is not None:
        Tracker(log)  # a tool that is missing is refused before the images are read
    if not isinstance(data, ImageSet):
        held_out = open_held_out(data, data_root, margin)
    if held_out is not None:
        check_held_out(data if isinstance(data, ImageSet) else open_training(spec), held_out)
    job = prepare(
        spec,
        data if isinstance(data, ImageSet) else None,
        clip=backbone if isinstance(backbone, Clip) else None,
        roles=roles if isinstance(roles, RoleMap) else None,
        without=removal,
        device=device,
        progress=progress,
        unlabeled=unlabeled if isinstance(unlabeled, ImageSet) else None,
    )
    job.method.pick_mode(mode)
    _log_plan(job, held_out, resume)
    with tracked_steps(log) as each_step:
        model = fit(job, out, resume=resume, progress=progress, log=each_step, stop=stop)
    metrics: dict[str, Any] = {} if job.focus is None else {"focus": asdict(job.focus)}
    if check and held_out is not None:
        accuracy = held_out_accuracy(model, held_out, progress)
        metrics[HELD_OUT.format(source)] = {
            "accuracy": accuracy.after,
            "zero_shot": accuracy.before,
            "images": accuracy.images,
            "available": accuracy.available,
            **({"copies": accuracy.copies} if accuracy.copies else {}),
            **({} if accuracy.measure == "accuracy" else {"measure": accuracy.measure}),
        }
    _add_metrics(model, out, metrics)
    return model


def _check_roles_used(method: str, without: object, focus: str | None) -> None:
    if not find_method(method).uses_roles and not without and focus is None:
        raise UsageError(f"roles: the method {method!r} uses no role map; leave it out")


def _log_plan(job: Job, held_out: ImageSet | None, resume: bool) -> None:
    """Log what is about to be done, what to know before, and how long it will take."""
    for reason in (*job.unreadable, *(() if job.pool is None else job.pool.unreadable)):
        _log.warning("skipped: %s", reason)
    for notice in job.notices:
        _log.warning("notice: %s", notice)
    used = len(job.images)
    rest = job.available - used - len(job.unreadable)
    unlabeled = 0 if job.pool is None else job.pool.used
    rest -= unlabeled if job.spec.unlabeled == REST else 0  # they are of the same dataset
    more = f" and {unlabeled:,} unlabeled images" if unlabeled else ""
    unused = f"{more} ({rest:,} more are not used)" if rest else more
    testing = f"{len(held_out):,} images held out for testing" if held_out is not None else "none held out"
    steps = "no training steps"
    if job.steps:
        steps = f"{format_count(job.recipe.epochs, 'epoch')}, {format_count(job.steps, 'step')}"
    classes = len(job.method.classes)
    _log.info(
        "training %s on %s images of %d classes%s, %s; %s",
        job.method.title, f"{used:,}", classes, unused, testing, steps,
    )  # fmt: skip
    expected = None if resume or not _log.isEnabledFor(logging.INFO) else estimate(job)
    if expected is not None:
        more = (
            f", then calibration about {format_duration(expected.calibration)}"
            if expected.calibration
            else ""
        )
        _log.info("estimated time: training about %s%s", format_duration(expected.training), more)


def _add_metrics(model: Model, out: PathLike | None, entries: Mapping[str, Any]) -> None:
    """Add entries to the metrics of a run; a full disk only costs the entries."""
    if not entries:
        return
    model.metrics.update(entries)
    if out is None:
        return
    try:
        add_metrics(out, **entries)
    except DiskError as error:
        _log.warning("notice: not added to the metrics of the run: %s", error)
