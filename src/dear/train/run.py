"""Training with a run folder: saved regularly, resumable after a crash, stopped between steps by Ctrl-C."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dear.calibration.reference import Reference
from dear.data.folds import IntArray
from dear.data.images import ImageSet
from dear.errors import OutOfMemory, RunError, is_out_of_memory
from dear.methods.base import Method
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
    """The user stopped the training; it can be resumed."""

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
    units: IntArray | None = None,
) -> Model:
    """Train a method on an image set, and write a run folder if `out` is set.

    `dear.train.fit` trains a Spec: it also prepares, balances and calibrates.

    Args:
        method: freshly built; its learned tensors are changed in place.
        images: the training set; its labels number the method's classes.
        recipe: training recipe; None: the method's default.
        out: the run folder; None keeps everything in memory.
        resume: continue the run in `out` where it was saved last; the result has the same bits as that of
            a run never interrupted (on the CPU).
        progress: called with (steps done, steps in all, last line of the log) after every step.
        stop: called after every step; True stops as Ctrl-C does.
        save_every: steps between saves within an epoch.
        spec: complete, for the folder; None: derived from method, recipe and images.
        views: frozen stages of the images, if they are shared with other trainings.
        units: of the images, [n]; copies of an image have the same, and a method that chooses a value on
            held-out images holds them out together. None: images with equal features are copies.
    """
    recipe = Recipe.of(method) if recipe is None else recipe
    check_labels(method, images)
    spec = Spec.of(method, recipe, images) if spec is None else spec
    with (
        _deterministic(recipe.deterministic),
        _interrupts(stop) as stopped,
        _open_run(out, method, spec, resume) as run,
        torch.enable_grad(),  # also when called under no_grad
    ):
        if run.state == "finished" and run.folder is not None:
            return _load_finished(method, spec, run.folder)
        work = method.in_precision(recipe.precision)  # shares what is learned with `method`
        loop = Loop(work, Feed(images, work.clip, recipe, units), recipe, views)
        run.restore(loop)
        try:
            complete = loop.run(progress, lambda: run.save(loop), save_every, stopped)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # A smaller batch changes the result, so the caller decides.
            raise OutOfMemory(
                f"out of memory on {work.clip.device} at step {loop.step + 1} of {loop.steps} with batches "
                f"of {recipe.batch} images; choose a smaller batch in the recipe",
                hint="batch",
            ) from error
        if not complete:
            raise run.paused(loop)
        metrics = {
            "steps": loop.steps,
            "seconds": round(run.seconds, 3),
            "trained": datetime.now(UTC).isoformat(timespec="seconds"),
            "trainable_parameters": method.learned_parameters,
            "loss": loop.lines[-1] if loop.lines else None,
            **plain(method.learned_values()),
        }
        model = Model(method, spec=spec, metrics=metrics, lines=loop.lines, path=run.folder)
        run.finish(model)
        return model


class _Run:
    """A training's run folder and its clock; without a folder nothing is saved."""

    def __init__(self, folder: Path | None = None, state: str = "new") -> None:
        self.folder, self.state = folder, state
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, of all processes that trained it."""
        return time.perf_counter() - self._began

    def restore(self, loop: Loop) -> None:
        """Continue from the last saved state of the folder, if there is one."""
        if self.folder is not None and self.state == "resumable":
            self._began -= restore(loop, self.folder)

    def save(self, loop: Loop) -> None:
        """Save the state to resume from."""
        if self.folder is not None:
            save_state(loop, self.folder, self.seconds)

    def paused(self, loop: Loop) -> Paused:
        """The error of a training that the user stopped."""
        where = "nothing is saved" if self.folder is None else f"{self.folder} can be resumed"
        hint = None if self.folder is None else "resume"
        return Paused(f"stopped after step {loop.step} of {loop.steps}; {where}", hint=hint)

    def finish(self, model: Model) -> None:
        """Write the trained model and remove the state to resume from."""
        if self.folder is not None:
            model.write(self.folder)
            (self.folder / "resume.safetensors").unlink(missing_ok=True)


@contextmanager
def _open_run(out: str | os.PathLike[str] | None, method: Method, spec: Spec, resume: bool) -> Iterator[_Run]:
    """The run in a folder, which is locked meanwhile; a run that fails at its start leaves no files."""
    if out is None:
        yield _Run()
        return
    folder = Path(out)
    fresh = not folder.exists()
    try:
        with locked(folder), rollback_on_failure(folder):
            state = open_folder(folder, spec, resume)
            if state == "new":
                write_spec(folder, method, spec)
            yield _Run(folder, state)
    finally:
        if fresh:
            with suppress(OSError):  # removes only an empty folder
                folder.rmdir()


def _load_finished(method: Method, spec: Spec, folder: Path) -> Model:
    """The model of a finished run."""
    load_adapter(method, folder)
    calibration, reference = read_calibration(folder), Reference.load(folder)
    return Model(method, calibration, reference=reference, spec=spec, path=folder)


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


def check_labels(method: Method, images: ImageSet) -> None:
    """Raise a RunError for labels that are not classes of the method."""
    labels = images.labels
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(method.classes):
        raise RunError(
            f"{images.name}: labels must be from 0 to {len(method.classes) - 1}, the classes of the method, "
            f"got {int(labels.min())} to {int(labels.max())}"
        )


@contextmanager
def _interrupts(stop: Callable[[], bool] | None) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends training between two steps; the second raises KeyboardInterrupt as usual."""
    pressed = threading.Event()

    def stopped() -> bool:
        return pressed.is_set() or (stop is not None and stop())

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.getsignal(signal.SIGINT)

    def on_first(number: int, frame: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, on_first)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Deterministic kernels while training, if the recipe asks for them."""
    if not enabled:  # disabling it afterwards would import PyTorch's compiler, which takes seconds
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
    """Save the log and the state to resume from; `seconds` is the training time so far."""
    tensors, metadata = loop.state()
    write_log(folder, loop.lines)
    write_safetensors(folder / "resume.safetensors", tensors, {**metadata, "seconds": f"{seconds:.3f}"})


def restore(loop: Loop, folder: Path) -> float:
    """Continue from the folder's saved state; returns the seconds that earlier processes trained for."""
    path = folder / "resume.safetensors"
    tensors, metadata = read_safetensors(path, "saved training state")
    require_finite(tensors, str(path))
    try:
        if not 0 < int(metadata["step"]) <= loop.steps:
            raise ValueError(f"step {metadata['step'][:20]} of {loop.steps}")
        window = tensors.get("window")
        if window is not None and (window.dim() != 2 or window.shape[1] != len(metadata["parts"].split())):
            raise ValueError("its losses do not match their names")
        loop.restore(tensors, metadata, read_log(folder))
        _check_optimizer(loop, [name for name in tensors if name.startswith("optimizer.")])
        seconds = float(metadata.get("seconds", 0.0))
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{seconds} seconds of training")
        return seconds
    except RunError as error:
        raise RunError(f"{path}: {error}") from error
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise RunError(f"{path}: is damaged ({error}); delete it to start again") from error


def _check_optimizer(loop: Loop, names: list[str]) -> None:
    """Raise a ValueError for an optimizer's state that would fail in a later step."""
    expected = {"momentum_buffer"} if loop.recipe.optimizer == "sgd" else {"step", "exp_avg", "exp_avg_sq"}
    count = 0
    for parameter in loop.learned:
        state = loop.optimizer.state.get(parameter, {})
        count += len(state)
        if state and set(state) != expected:
            raise ValueError("the optimizer's state is incomplete")
        if any(value.shape not in (parameter.shape, torch.Size([])) for value in state.values()):
            raise ValueError("the optimizer's state does not match the shapes of the learned tensors")
    if count != len(names):
        raise ValueError("the optimizer's state contains tensors that are not learned")
