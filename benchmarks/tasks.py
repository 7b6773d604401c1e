"""Wall time of whole base-to-novel runs at the sizes of real datasets: 16 shots, ten epochs, then the test.

    python benchmarks/tasks.py --device cuda --csv benchmarks/results/tasks.csv
    python benchmarks/tasks.py --device cuda --tasks DTD

Random images of the right number, held in memory as bytes (decoding is measured by images.py), random
words, random weights of the ViT-B/16 size. Training is `dear.train.train` with the paper's recipe; the test
answers every test image of base and novel classes in both modes. "start" is what comes once before:
building the backbone and, for the first task, loading libraries and compiling kernels.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from measure.clock import wait
from measure.script import DEVICE, arguments, record
from measure.task import noise, token_ids

import dear
from dear.heads.roles import RoleMap
from dear.methods import DeAR, build_method
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.train.run import train

SHOTS = 16
SIZES = {"EuroSAT": (10, 8_100), "DTD": (47, 1_692), "SUN397": (397, 19_850), "ImageNet": (1000, 50_000)}


def run(clip: dear.Clip, name: str, epochs: int) -> dict[str, Any]:
    """Train and test one task."""
    classes, tests = SIZES[name]
    base = -(-classes // 2)
    ids = token_ids(clip.config, classes)
    shots = noise(base, base * SHOTS, 500, 375)
    Model(build_method("zeroshot", clip, shots.classes, ids=ids[:base])).evaluate(shots)  # makes the views
    model = DeAR(clip, shots.classes, roles=RoleMap.table2(), ids=ids[:base])
    device = clip.device
    wait(device)
    began = time.perf_counter()
    trained = train(model, shots, Recipe(epochs=epochs))
    wait(device)
    middle = time.perf_counter()
    done = 0
    for half, rows in ((base, ids[:base]), (classes - base, ids[base:])):
        part = noise(half, round(tests * half / classes), 500, 375)
        other = model if rows is ids[:base] else model.with_classes(part.classes, ids=rows)
        Model(other).evaluate(part)
        done += len(part)
    wait(device)
    ended = time.perf_counter()
    steps = epochs * -(-len(shots) // 16)
    return {
        "task": name,
        "base_classes": base,
        "training_images": len(shots),
        "steps": steps,
        "test_images": done,
        "train_s": round(middle - began, 2),
        "test_s": round(ended - middle, 2),
        "run_s": round(ended - began, 2),
        "ms_a_step": round(1000 * (middle - began) / steps, 2),
        "last_loss": round(float(trained.lines[-1]["loss"]), 4),
    }


def main() -> None:
    began = time.perf_counter()
    options = arguments(__doc__, device=DEVICE, tasks=list(SIZES), shape="ViT-B-16", epochs=10, csv=Path)
    torch.manual_seed(0)
    clip = dear.Clip(dear.ClipConfig.named(options.shape)).to(options.device)
    run(clip, "EuroSAT", 2)  # the first run loads libraries and compiles kernels
    print(f"start: {time.perf_counter() - began:.1f} s")
    for name in options.tasks:
        row = {"shape": options.shape, "epochs": options.epochs, **run(clip, name, options.epochs)}
        record(options.csv, [row], options.device)


if __name__ == "__main__":
    main()
