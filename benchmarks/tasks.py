"""Wall time of whole base-to-novel runs at the sizes of real datasets: 16 shots, ten epochs, then the test.

    python benchmarks/tasks.py --device cuda --csv benchmarks/results/tasks.csv
    python benchmarks/tasks.py --device cuda --tasks DTD

Random images of the right number, held in memory as bytes (decoding is measured by images.py), random
words, random weights of the ViT-B/16 size. Training is `dear.train.train` with the paper's recipe; the test
answers every test image of base and novel classes in both modes. "start" is what comes once before:
building the backbone and, for the first task, loading libraries and compiling kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure.clock import wait
from measure.task import token_ids
from PIL import Image
from torch import Tensor

import dear
from dear._io.image_file import resize_crop
from dear.heads.roles import RoleMap
from dear.methods import DeAR
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.train.run import train
from dear.workflows.speed import add_rows, machine

SHOTS = 16
SIZES = {"EuroSAT": (10, 8_100), "DTD": (47, 1_692), "SUN397": (397, 19_850), "ImageNet": (1000, 50_000)}
_POOL = 64  # images that exist; a set shows them again and again, for time does not depend on what they show


class Noise:
    """A ImageSet of random images in memory."""

    def __init__(self, name: str, classes: int, count: int) -> None:
        self.name, self.template, self.domains = name, "a photo of a {}.", None
        self.classes = tuple(f"class {i}" for i in range(classes))
        self.labels = torch.arange(count) % classes
        generator = np.random.default_rng(0)
        arrays = generator.integers(0, 256, (_POOL, 375, 500, 3), dtype=np.uint8)
        self._pool = [Image.fromarray(array) for array in arrays]
        self._views: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """An image as decoded."""
        return self._pool[index % _POOL]

    def pixels(self, indices: Sequence[int], size: int) -> Tensor:
        """The evaluation views, uint8 [b, 3, size, size]."""
        for index in {i % _POOL for i in indices} - set(self._views):
            self._views[index] = resize_crop(self._pool[index], size)
        return torch.stack([self._views[i % _POOL] for i in indices])

    def key(self, index: int) -> str:
        """A stable name."""
        return f"{self.name}/{index}"

    def subset(self, indices: Sequence[int]) -> Noise:
        """Not needed here."""
        raise NotImplementedError

    def select_classes(self, names: Sequence[str]) -> Noise:
        """Not needed here."""
        raise NotImplementedError


def run(clip: dear.Clip, name: str, epochs: int) -> dict[str, Any]:
    """Train and test one task."""
    classes, tests = SIZES[name]
    base = -(-classes // 2)
    ids = token_ids(clip.config, classes)
    shots = Noise(name, base, base * SHOTS)
    shots.pixels(range(_POOL), clip.config.vision.image_size)  # test views are decoded already
    model = DeAR(clip, shots.classes, roles=RoleMap.table2(), ids=ids[:base])
    device = clip.device
    wait(device)
    began = time.perf_counter()
    trained = train(model, shots, Recipe(epochs=epochs))
    wait(device)
    middle = time.perf_counter()
    done = 0
    for half, rows in ((base, ids[:base]), (classes - base, ids[base:])):
        part = Noise(name, half, round(tests * half / classes))
        part._pool, part._views = shots._pool, shots._views
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
    """Measure, print, and add rows to a CSV file if one is named."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--shape", default="ViT-B-16", choices=dear.ClipConfig.names())
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    clip = dear.Clip(dear.ClipConfig.named(options.shape)).to(device)
    run(clip, "EuroSAT", 2)  # the first run loads libraries and compiles kernels
    start = time.perf_counter() - began
    print(f"start: {start:.1f} s")
    for name in options.tasks:
        row = run(clip, name, options.epochs)
        print(", ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
        if options.csv:
            add_rows(
                options.csv, [{**machine(device), "shape": options.shape, "epochs": options.epochs, **row}]
            )


if __name__ == "__main__":
    main()
