"""How the step's time and memory grow with classes, resolution and batch.

    python benchmarks/growth.py --device cuda --csv benchmarks/results/growth.csv

One of the three grows at a time, from batch 16, 50 classes and 224 pixels. Operations and their share by
part are counted as in docs/performance.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure.clock import medians, peak
from measure.count import dear_step
from measure.script import DEVICE, arguments, record
from measure.task import SpeedTask

import dear

START = {"batch": 16, "classes": 50, "pixels": 224}
GROWTH = {
    "batch": (4, 16, 64, 128),
    "classes": (10, 100, 1000),
    "pixels": (224, 336, 448),
}


def points() -> Iterator[tuple[str, dict[str, int]]]:
    """What grows, and the settings of the step."""
    for name, values in GROWTH.items():
        for value in values:
            yield name, {**START, name: value}


def measure(clip: dear.Clip, at: dict[str, int], repeats: int) -> dict[str, Any]:
    """Time, memory and operations of a step."""
    task = SpeedTask(clip, at["batch"], at["classes"])
    steps = task.ours()
    held = peak(steps.run, clip.device)
    warm_up = 3 if clip.device.type == "cuda" else 1
    value = medians({"step": steps.run}, repeats, warm_up)["step"] / steps.count
    words = int(task.ids.argmax(-1).max()) + 1
    count = dear_step(clip.config, at["batch"], at["classes"], words)
    shares = {f"share_{name}": round(n / count.total, 4) for name, n in vars(count).items()}
    return {
        **at,
        "ms": round(1000 * value, 3),
        "peak_mb": "" if held is None else round(held / 2**20),
        "teraoperations": round(count.total / 1e12, 4),
        **shares,
    }


def main() -> None:
    options = arguments(__doc__, device=DEVICE, shape="ViT-B-16", repeats=5, csv=Path)
    shape = dear.ClipConfig.named(options.shape)
    clips: dict[int, dear.Clip] = {}
    for name, at in points():
        pixels = at["pixels"]
        if pixels not in clips:
            vision = dataclasses.replace(shape.vision, image_size=pixels)
            clips = {pixels: dear.Clip(dataclasses.replace(shape, vision=vision)).to(options.device)}
        row = {"shape": options.shape, "grows": name, **measure(clips[pixels], at, options.repeats)}
        record(options.csv, [row], options.device)


if __name__ == "__main__":
    main()
