"""Experiment trackers: the lines of a training's log, and the results of a grid's cells, as scalars."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from dear.errors import UsageError
from dear.train.loop import OnStep
from dear.utils.extras import install_command

_SKIPPED = ("step", "epoch")
Write = Callable[[Mapping[str, float], int], None]  #: scalars by name, and their step


class Tracker:
    """Writes scalars to the tool that `log` names, one run of the tool per curve.

    Args:
        log: "tensorboard:FOLDER", "mlflow:FOLDER or address of a server", "wandb:PROJECT", "trackio:PROJECT";
            without a destination, the folder `runs` or `mlruns`, or the project `dear`.

    Raises:
        UsageError: no such tool, or it is not installed.
    """

    def __init__(self, log: str) -> None:
        tool, _, destination = log.partition(":")
        if tool not in _TOOLS:
            raise UsageError(
                f"log must begin with {', '.join(_TOOLS)}, got {log!r}; example: tensorboard:logs"
            )
        try:
            self._open = _TOOLS[tool](destination)
        except ImportError:
            command = install_command(tool) if tool == "tensorboard" else f"pip install {tool}"
            raise UsageError(f"log {tool!r} needs a package that is not installed: {command}") from None
        self._runs: dict[str, tuple[Write, Callable[[], None]]] = {}
        self._last = 0

    def write(self, run: str, values: Mapping[str, float], step: int) -> None:
        """Write scalars of a run, which begins with its first ones."""
        if run not in self._runs:
            self._runs[run] = self._open(run)
        self._runs[run][0](values, step)

    def line(self, line: Mapping[str, float | int]) -> None:
        """Write a line of the training log; called after every step, each line counts once."""
        step = int(line.get("step", 0))
        if step > self._last:
            self._last = step
            self.write("", {f"train/{k}": float(v) for k, v in line.items() if k not in _SKIPPED}, step)

    def result(
        self, run: str, group: str, step: int, modes: Mapping[str, Mapping[str, float | None]]
    ) -> None:
        """Write accuracies by mode and column: a curve for `run` (a method), one chart per column and mode.

        `group` names what was measured on (protocol and dataset), `step` is the place on the axis (the seed).
        """
        values = {
            "/".join(map(_safe_name, (group, column, *(() if mode == "default" else (mode,))))): value
            for mode, row in modes.items()
            for column, value in row.items()
            if value is not None
        }
        self.write(_safe_name(run), values, step)

    def close(self) -> None:
        """Write what is waiting and end the runs."""
        for _, close in self._runs.values():
            close()


@contextmanager
def tracked_steps(log: str | None) -> Iterator[OnStep]:
    """A training's step callback that writes to a tracker; without one it does nothing."""
    if log is None:
        yield lambda step, steps, line: None
        return
    tracker = Tracker(log)
    try:
        yield lambda step, steps, line: tracker.line(line)
    finally:
        tracker.close()


def _safe_name(name: str) -> str:
    """A name that is safe as a folder and as a tag.

    >>> _safe_name("world:textures"), _safe_name("../x")
    ('world-textures', 'x')
    """
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "unnamed"


_Open = Callable[[str], tuple[Write, Callable[[], None]]]  # name of a run -> how to write to it and end it


def _tensorboard(place: str) -> _Open:
    """A folder that `tensorboard --logdir` shows, one subfolder per run."""
    SummaryWriter = import_module("torch.utils.tensorboard.writer").SummaryWriter

    def begin(run: str) -> tuple[Write, Callable[[], None]]:
        writer = SummaryWriter(str(Path(place or "runs") / run))

        def write(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return write, writer.close

    return begin


def _mlflow(place: str) -> _Open:
    """A folder or a server that `mlflow ui` shows; the experiment is called dear.

    A folder gets a database, `mlflow.db`: MLflow no longer writes plain files.
    """
    mlflow = import_module("mlflow")
    address = place
    if not re.match(r"\w+:/", place):
        folder = Path(place or "mlruns").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        address = f"sqlite:///{folder / 'mlflow.db'}"
    client = mlflow.MlflowClient(address)

    def begin(run: str) -> tuple[Write, Callable[[], None]]:
        experiment = client.get_experiment_by_name("dear")
        number = client.create_experiment("dear") if experiment is None else experiment.experiment_id
        key = client.create_run(number, run_name=run or None).info.run_id

        def write(values: Mapping[str, float], step: int) -> None:
            now = time.time_ns() // 1_000_000
            metrics = [mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]
            client.log_batch(key, metrics)

        return write, lambda: client.set_terminated(key)

    return begin


def _wandb(tool: str) -> Callable[[str], _Open]:
    """Weights & Biases, and Trackio, which has the same functions."""

    def of(place: str) -> _Open:
        module: Any = import_module(tool)

        def begin(run: str) -> tuple[Write, Callable[[], None]]:
            started = module.init(project=place or "dear", name=run or None)
            return lambda values, step: started.log(dict(values), step=step), started.finish

        return begin

    return of


_TOOLS: dict[str, Callable[[str], _Open]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb("wandb"),
    "trackio": _wandb("trackio"),
}
