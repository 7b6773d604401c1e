"""A quick look at one machine: a training step, inference and the data feed, each against the usual way."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dear.clip.config import ClipConfig
from dear.clip.model import Clip
from dear.errors import UsageError
from dear.speed.images import image_rates
from dear.speed.inference import inference
from dear.speed.mmrl import check_copy
from dear.speed.steps import matrix_rate, step_rows
from dear.speed.table import machine
from dear.speed.task import SpeedTask
from dear.train.precision import choose

PARTS = ("step", "inference", "images")


@dataclass(frozen=True)
class QuickLook:
    """What to measure. Zeros mean: as fits the device."""

    shape: str = "ViT-B-16"
    batch: int = 0
    classes: int = 0
    precision: str = "auto"
    images: int = 64
    mmrl: Path | None = None
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("classes", self.classes)):
            if value < 0 or (name == "classes" and value == 1):
                raise UsageError(
                    f"{name} = {value}: give a number of at least {2 if name == 'classes' else 1}"
                )
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise UsageError(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
        if self.mmrl is not None:
            check_copy(self.mmrl)
        if self.images < 8:
            raise UsageError(f"images = {self.images}: give at least 8")


def measure(
    look: QuickLook, device: torch.device, told: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """Rows with the same columns: what was measured, who, the time and the ratio to the usual way.

    Args:
        look: what to measure.
        device: where.
        told: called with the name of each part before it starts.
    """
    gpu = device.type == "cuda"
    batch, classes = look.batch or (16 if gpu else 2), look.classes or (100 if gpu else 10)
    told("building a random model")
    torch.manual_seed(0)
    clip = Clip(ClipConfig.named(look.shape)).to(device)
    where = {**machine(device), "shape": look.shape}
    if "step" in look.parts:
        told("training steps")
        rate = matrix_rate(device, choose(look.precision, device)) if gpu else None
        repeats, warm_up = (7, 3) if gpu else (3, 1)
        steps = step_rows(clip, batch, classes, look.precision, look.mmrl, repeats, rate, warm_up=warm_up)
        for row in steps:
            ratio = row["mmrl++_ratio"] or row["literal_ratio"]
            yield {**where, **_row("step", row["step"], batch, row, row["ms"], ratio), "classes": classes}
    if "inference" in look.parts:
        told("inference")
        others = ("transformers",) if importlib.util.find_spec("transformers") else ()
        task = SpeedTask(clip, 1, classes, look.precision)
        size = 256 if gpu else 4
        for row in inference(task, [size], others, 10 if gpu else 3):
            yield {**where, **_row("inference", row["model"], size, row, row["ms"], row["to_plain"])}
    if "images" in look.parts:
        told("images from files")
        workers = 8 if gpu else 2
        rows = image_rates(clip, look.images, 16, epochs=2, workers=(workers,))
        base = {row["epoch"]: row["images_per_s"] for row in rows if row["way"] != "dear"}
        for row in rows:
            name = f"{row['way']}, epoch {row['epoch']}"
            ratio = round(row["images_per_s"] / base[row["epoch"]], 2)
            ms = round(1000 * row["seconds"], 1)
            yield {**where, **_row("images", name, row["images"], row, ms, ratio)}


def _row(what: str, name: str, batch: int, row: dict[str, Any], ms: float, ratio: float) -> dict[str, Any]:
    return {
        "what": what,
        "name": name,
        "batch": batch,
        "classes": "",
        "precision": row.get("precision", ""),
        "ms": ms,
        "images_per_s": row["images_per_s"],
        "ratio": ratio,
    }
