"""How the step's time and memory grow with classes, attribute tokens, resolution and batch.

    python benchmarks/growth.py --device cuda --csv benchmarks/results/growth.csv

One of the four grows at a time, from batch 16, 50 classes, one token per attribute and 224 pixels. Beside
the time stand the operations counted and their share by part (docs/performance.md has the counting).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure.clock import medians, peak
from measure.count import dear_step
from measure.task import SpeedTask

import dear
from dear.workflows.speed import add_rows, machine

START = {"batch": 16, "classes": 50, "tokens": 1, "pixels": 224}
GROWTH = {
    "batch": (4, 16, 64, 128),
    "classes": (10, 100, 1000),
    "tokens": (1, 4, 16),
    "pixels": (224, 336, 448),
}


def points() -> Iterator[tuple[str, dict[str, int]]]:
    """What grows, and where it stands."""
    for name, values in GROWTH.items():
        for value in values:
            yield name, {**START, name: value}


def measure(clip: dear.Clip, at: dict[str, int], repeats: int) -> dict[str, Any]:
    """Time, memory and operations of a step."""
    task = SpeedTask(clip, at["batch"], at["classes"], tokens=at["tokens"])
    steps = task.ours()
    held = peak(steps.run, clip.device)
    warm_up = 3 if clip.device.type == "cuda" else 1
    value = medians({"step": steps.run}, repeats, warm_up)["step"] / steps.count
    words = int(task.ids.argmax(-1).max()) + 1
    count = dear_step(clip.config, at["batch"], at["classes"], words, tokens=5 * at["tokens"])
    shares = {f"share_{name}": round(n / count.total, 4) for name, n in vars(count).items()}
    return {
        **at,
        "ms": round(1000 * value, 3),
        "peak_mb": "" if held is None else round(held / 2**20),
        "teraoperations": round(count.total / 1e12, 4),
        **shares,
    }


def main() -> None:
    """Measure, print, and add rows to a CSV file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="ViT-B-16", choices=dear.ClipConfig.names())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    shape = dear.ClipConfig.named(options.shape)
    clips: dict[int, dear.Clip] = {}
    rows = []
    for name, at in points():
        pixels = at["pixels"]
        if pixels not in clips:
            vision = dataclasses.replace(shape.vision, image_size=pixels)
            clips = {pixels: dear.Clip(dataclasses.replace(shape, vision=vision)).to(device)}
        rows.append({"grows": name, **measure(clips[pixels], at, options.repeats)})
        print(", ".join(f"{key}: {value}" for key, value in rows[-1].items()), flush=True)
    if options.csv:
        add_rows(options.csv, [{**machine(device), "shape": options.shape, **row} for row in rows])


if __name__ == "__main__":
    main()
