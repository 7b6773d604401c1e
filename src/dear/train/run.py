"""Training with a run folder: saved regularly, resumable after a crash, stopped cleanly by Ctrl-C."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dear.calibration.reference import Reference
from dear.data.images import ImageSet
from dear.errors import OutOfMemory, RunError, ran_out
from dear.methods.base import Method, in_precision
from dear.runs.folder import (
    load_adapter,
    locked,
    open_folder,
    read_calibration,
    read_log,
    write_log,
    write_spec,
)
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.runs.spec import Spec, plain
from dear.train.feed import Feed
from dear.train.frozen import FrozenViews
from dear.train.loop import Loop, OnStep
from dear.utils.files import read_safetensors, require_finite, write_safetensors


class Paused(RunError):  # noqa: N818 (a state, not a mistake)
    """Training was stopped by the user and can be continued."""

    status = 130


def train(
    method: Method,
    images: ImageSet,
    recipe: Recipe | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: OnStep | None = None,
    stop: Callable[[], bool] | None = None,
    save_every: int = 200,
    spec: Spec | None = None,
    views: FrozenViews | None = None,
) -> Model:
    """Train a method that was built by hand on a set, and leave a run folder if `out` is given.

    `dear.train.fit` trains what a Spec says, with everything around it.

    Args:
        method: freshly built; its learned tensors are changed in place.
        images: the training set; its labels number the method's classes.
        recipe: how; None: the method's own.
        out: the run folder; None keeps everything in memory.
        resume: continue the run in `out` where it was saved last; the result has the same bits as that of
            a run never interrupted (on the CPU).
        progress: called with (steps done, steps in all, last line of the log) after every step.
        stop: called after every step; True stops as Ctrl-C does.
        save_every: steps between saves within an epoch.
        spec: complete, for the folder; None: made of method, recipe and images.
        views: what the frozen backbone makes of the images, where it is shared with other trainings.
    """
    recipe = Recipe.of(method) if recipe is None else recipe
    check_labels(method, images)
    folder = None if out is None else Path(out)
    spec = Spec.of(method, recipe, images) if spec is None else spec
    with _deterministic(recipe.deterministic), _interrupts(stop) as stopped:
        loop = partial(_train, method, images, recipe, folder, progress, stopped, save_every, spec, views)
        if folder is None:
            return loop(resumable=False)
        fresh = not folder.exists()
        try:
            with locked(folder), rollback_on_failure(folder):
                state = open_folder(folder, spec, resume)
                if state == "finished":
                    load_adapter(method, folder)
                    calibration, reference = read_calibration(folder), Reference.load(folder)
                    return Model(method, calibration, reference=reference, spec=spec, path=folder)
                if state == "new":
                    write_spec(folder, method, spec)
                trained = loop(resumable=state == "resumable")
                trained.write(folder)
                (folder / "resume.safetensors").unlink(missing_ok=True)
                return trained
        finally:
            if fresh:
                with suppress(OSError):  # only an empty folder goes
                    folder.rmdir()


@contextmanager
def rollback_on_failure(folder: Path) -> Iterator[None]:
    """Remove the files of a run that failed before there was anything to continue from."""
    ours = [folder / name for name in ("config.json", "roles.json") if not (folder / name).exists()]
    try:
        yield
    except Exception:
        if not (folder / "resume.safetensors").exists() and not (folder / "metrics.json").exists():
            for path in ours:
                path.unlink(missing_ok=True)
        raise


def _train(
    method: Method,
    images: ImageSet,
    recipe: Recipe,
    folder: Path | None,
    progress: OnStep | None,
    stop: Callable[[], bool],
    save_every: int,
    spec: Spec,
    views: FrozenViews | None,
    resumable: bool,
) -> Model:
    """Run the training loop."""
    began, before = time.perf_counter(), 0.0

    def seconds() -> float:
        return before + time.perf_counter() - began

    with torch.enable_grad():  # also when called under no_grad
        work = in_precision(method, recipe.precision)  # shares what is learned with `method`
        loop = Loop(work, Feed(images, work.clip, recipe), recipe, views)
        if folder is not None and resumable:
            before = restore(loop, folder)

        def save() -> None:
            if folder is not None:
                save_state(loop, folder, seconds())

        try:
            complete = loop.run(progress, save, save_every, stop)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            # Smaller batches would be other steps, so it is not for us to choose them.
            raise OutOfMemory(
                f"out of memory on {work.clip.device} at step {loop.step + 1} of {loop.steps} with batches "
                f"of {recipe.batch} images; choose a smaller batch in the recipe",
                hint="batch",
            ) from error
    if not complete:
        where = "nothing is saved" if folder is None else f"{folder} can be resumed"
        raise Paused(
            f"stopped after step {loop.step} of {loop.steps}; {where}",
            hint=None if folder is None else "resume",
        )
    metrics = {
        "steps": loop.steps,
        "seconds": round(seconds(), 3),
        "trained": datetime.now(UTC).isoformat(timespec="seconds"),
        "trainable_parameters": method.learned_parameters,
        "loss": loop.lines[-1] if loop.lines else None,
        **plain(method.facts()),
    }
    return Model(method, spec=spec, metrics=metrics, lines=loop.lines, path=folder)


def check_labels(method: Method, images: ImageSet) -> None:
    """Refuse labels that name no class of the method."""
    labels = images.labels
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(method.classes):
        raise RunError(
            f"{images.name}: labels reach from {int(labels.min())} to {int(labels.max())}, but the method "
            f"has {len(method.classes)} classes"
        )


@contextmanager
def _interrupts(stop: Callable[[], bool] | None) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C end training between two steps; the second is as usual."""
    pressed = threading.Event()

    def stopped() -> bool:
        return pressed.is_set() or (stop is not None and stop())

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.getsignal(signal.SIGINT)

    def first(number: int, frame: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, first)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic kernels while training, if the recipe asks for them."""
    if not wanted:  # switching it off again would import PyTorch's compiler: seconds
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def save_state(loop: Loop, folder: Path, seconds: float) -> None:
    """Save the log and all that is needed to continue; `seconds` of training so far."""
    tensors, words = loop.state()
    write_log(folder, loop.lines)
    write_safetensors(folder / "resume.safetensors", tensors, {**words, "seconds": f"{seconds:.3f}"})


def restore(loop: Loop, folder: Path) -> float:
    """Continue from the folder's saved state; returns the seconds that earlier processes trained for."""
    path = folder / "resume.safetensors"
    tensors, words = read_safetensors(path, "saved training state")
    require_finite(tensors, str(path))
    try:
        if not 0 < int(words["step"]) <= loop.steps:
            raise ValueError(f"step {words['step'][:20]} of {loop.steps}")
        window = tensors.get("window")
        if window is not None and (window.dim() != 2 or window.shape[1] != len(words["parts"].split())):
            raise ValueError("its losses do not fit their names")
        loop.restore(tensors, words, read_log(folder))
        _check_optimizer(loop, [name for name in tensors if name.startswith("optimizer.")])
        seconds = float(words.get("seconds", 0.0))
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{seconds} seconds of training")
        return seconds
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise RunError(f"{path}: is damaged ({error}); delete it to start again") from error


def _check_optimizer(loop: Loop, names: list[str]) -> None:
    """Refuse an optimizer's state that would only fail some steps later."""
    expected = {"momentum_buffer"} if loop.recipe.optimizer == "sgd" else {"step", "exp_avg", "exp_avg_sq"}
    found = 0
    for parameter in loop.learned:
        state = loop.optimizer.state.get(parameter, {})
        found += len(state)
        if state and set(state) != expected:
            raise ValueError("the optimizer's state is incomplete")
        if any(value.shape not in (parameter.shape, torch.Size([])) for value in state.values()):
            raise ValueError("the optimizer's state does not fit the learned tensors")
    if found != len(names):
        raise ValueError("the optimizer's state is of more tensors than are learned")
