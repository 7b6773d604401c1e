"""Where the CPU seconds of a training go: `strong`, `quick`, and MMRL by stage.

    OMP_NUM_THREADS=1 python research/speed/training_stages.py --backbone SMALL \
        --csv research/results/training_stages.csv

Trainings of `strong_cost.py --epochs 4`, which take turns; medians of the CPU seconds of the process. A stage
that runs inside another one is subtracted from it. `rest` is what no stage contains.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from measure.script import arguments, record
from strong_cost import train_once

import dear
from dear.methods import MMRL, DeAR
from dear.methods.base import Method
from dear.train.frozen import FrozenViews
from dear.train.loop import StepParts

METHODS = {"strong": ("dear", None), "quick": ("dear", "quick"), "mmrl": ("mmrl", None)}
STAGES: tuple[tuple[str, type, str], ...] = (
    ("frozen_views", FrozenViews, "training"),
    ("evaluation_features", FrozenViews, "features"),
    ("directions", DeAR, "prepare"),
    ("images", DeAR, "image_sides"),
    ("images", MMRL, "features"),
    ("texts", DeAR, "texts"),
    ("texts", MMRL, "texts"),
    ("losses", DeAR, "loss_from_frozen"),
    ("losses", MMRL, "loss_from_frozen"),
    ("backward", Method, "backward"),
    ("optimizer", StepParts, "update"),
)
"""Name of the stage, and the method that computes it; crops and decoding are part of the views."""


@contextmanager
def timed(seconds: Counter[str]) -> Iterator[None]:
    """Add the CPU seconds of each stage to `seconds`, without those of stages inside it."""
    inner: list[float] = [0.0]

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def stage(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.process_time() - began
                seconds[name] += whole - inner.pop()
                inner[-1] += whole

        return stage

    with ExitStack() as stack:
        for name, owner, attribute in STAGES:
            stack.enter_context(patch.object(owner, attribute, wrap(name, getattr(owner, attribute))))
        yield


def main() -> None:
    options = arguments(
        __doc__, backbone="mini", classes=10, images=160, epochs=4, turns=(3, "trainings of each"), csv=Path
    )
    clip = dear.load(options.backbone, device="cpu")
    turns: dict[str, list[Counter[str]]] = {title: [] for title in METHODS}
    for _ in range(options.turns):
        for title, (name, preset) in METHODS.items():
            seconds: Counter[str] = Counter()
            began = time.process_time()
            with timed(seconds):
                train_once(clip, name, preset, options.classes, options.images, options.epochs)
            seconds["total"] = time.process_time() - began
            turns[title].append(seconds)
    rows = []
    for title, trainings in turns.items():
        row: dict[str, Any] = {"backbone": Path(options.backbone).name, "method": title}
        row |= {"images": options.images, "epochs": options.epochs, "turns": options.turns}
        names = [*dict.fromkeys(name for name, _, _ in STAGES), "total"]
        figures = {name: round(median(one[name] for one in trainings), 2) for name in names}
        figures["rest"] = round(figures["total"] - sum(figures[name] for name in names[:-1]), 2)
        rows.append(row | {f"{name}_s": value for name, value in figures.items()})
    record(options.csv, rows)


if __name__ == "__main__":
    main()
