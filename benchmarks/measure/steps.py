"""Training steps side by side: the literal one, MMRL++'s own, and ours as training runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dear.clip.model import Clip
from dear.errors import UsageError
from measure.clock import medians, peak
from measure.count import dear_step
from measure.mmrl import mmrlpp_step
from measure.task import SpeedTask, Steps

OURS = "dear"


def step_rows(
    clip: Clip,
    batch: int,
    classes: int,
    precision: str = "auto",
    mmrl: Path | None = None,
    repeats: int = 5,
    rate: float | None = None,
    ways: tuple[str, ...] = ("literal", OURS),
    warm_up: int = 3,
    literal_precision: str | None = None,
) -> list[dict[str, Any]]:
    """A row for each way to take a step; they take turns, and the first is what the others are compared with.

    Args:
        clip: the backbone, on its device.
        batch: images per step.
        classes: classes.
        precision: as in the recipe.
        mmrl: a copy of MMRL's repository, to measure its step too.
        repeats: runs of each, of which the median counts.
        rate: operations per second that the device's matrix products reach, for the share of the floor.
        ways: of "literal", "dear" and "dear, launched one by one".
        warm_up: runs that are not counted.
        literal_precision: of the literal step, if not the same.

    Raises:
        UsageError: the literal step and ours disagree about the loss.
    """
    task = SpeedTask(clip, batch, classes, precision)
    dtype = task.dtype
    if "literal" in ways:
        compare(task, dtype)
    makers: dict[str, Callable[[], Steps]] = {
        "literal": lambda: task.literal(literal_precision),
        "dear, launched one by one": task.eager,
        OURS: task.ours,
    }
    steps = {name: makers[name]() for name in ways}
    if mmrl is not None:
        rival = mmrlpp_step(mmrl, clip.config, task.ids, clip.device)
        steps = {"mmrl++": Steps(lambda: rival(*task.one())), **steps}
    held = {name: peak(step.run, clip.device) for name, step in steps.items()}
    found = medians({name: s.run for name, s in steps.items()}, repeats, warm_up)
    seconds = {name: found[name] / steps[name].count for name in steps}
    floor = dear_step(clip.config, batch, classes, words=int(task.ids.argmax(-1).max()) + 1).total
    shown = {"literal": literal_precision} if literal_precision else {}
    if clip.device.type == "cuda":
        shown["mmrl++"] = "float16"
    rows = []
    for name, value in seconds.items():
        row: dict[str, Any] = {
            "batch": batch,
            "classes": classes,
            "precision": shown.get(name, str(dtype).removeprefix("torch.")),
            "step": name,
            "ms": round(1000 * value, 3),
            "steps_per_s": round(1 / value, 2),
            "images_per_s": round(batch / value, 1),
            "peak_mb": "" if held[name] is None else round((held[name] or 0) / 2**20),
            "floor_share": ""
            if rate is None or not name.startswith(OURS)
            else round(floor / rate / value, 3),
        }
        for other in ("literal", "mmrl++"):
            row[f"{other}_ratio"] = round(seconds[other] / value, 2) if other in seconds else ""
        rows.append(row)
    return rows


def compare(task: SpeedTask, dtype: torch.dtype) -> None:
    """Check that the literal step and ours give the same loss.

    Raises:
        UsageError: they do not.
    """
    from measure.literal import LiteralStep

    with torch.autocast(task.device.type, dtype, enabled=dtype != torch.float32):
        theirs = LiteralStep(task.model, task.ids, task.clip).loss(*task.one()).item()
    ours = task.model.loss(*task.one()).total.item()
    if abs(ours - theirs) > (1e-4 if dtype == torch.float32 else 3e-2) * abs(theirs):
        raise UsageError(f"the literal step and ours disagree about the loss: {theirs} and {ours}")


def matrix_rate(device: torch.device, dtype: torch.dtype, repeats: int = 5) -> float:
    """Operations per second of a large matrix product on random data."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return float(2 * size**3 / medians({"product": lambda: a @ b}, repeats)["product"])
