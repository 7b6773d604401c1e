"""Seconds of a training step of every method, launched kernel by kernel and recorded (needs a GPU).

    python benchmarks/recorded_steps.py --out benchmarks/results/recorded_steps.csv

A random ViT-B/16 in bfloat16, 50 classes, the method's own batch (at most 64), 60 steps without the first 10.
`recorded` is "no" where a method says that its steps are dynamic.
"""

from __future__ import annotations

import argparse
import csv
import platform
import time
from datetime import date
from pathlib import Path

import torch
from measure.task import roles_of, token_ids
from torch import Tensor

from dear.clip.config import ClipConfig
from dear.clip.model import Clip
from dear.methods import METHODS, build_method
from dear.runs.recipe import Recipe
from dear.train.run import train

CLASSES, STEPS, FIRST = 50, 60, 10


class Noise:
    """Random images as an image set."""

    name, template, groups = "noise", "a photo of a {}.", None

    def __init__(self, count: int, size: int) -> None:
        self.classes = tuple(f"class {number}" for number in range(CLASSES))
        self.labels = torch.arange(count) % CLASSES
        self.domains = tuple("ab"[number % 2] for number in range(count))
        self.raw = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, indices: list[int], size: object) -> Tensor:
        """Some images."""
        return self.raw[list(indices)]

    def image(self, index: int):
        """One image."""
        from PIL import Image

        return Image.fromarray(self.raw[index].permute(1, 2, 0).numpy())

    def key(self, index: int) -> str:
        """Its name."""
        return str(index)


def step_seconds(name: str, clip: Clip, replay: bool) -> float:
    kind = METHODS[name]
    batch = min(64, Recipe.of(kind).batch)
    images = Noise(batch * STEPS, clip.config.vision.image_size)
    ids = token_ids(clip.config, CLASSES)
    method = build_method(name, clip, images.classes, roles=roles_of(clip.config), ids=ids)
    times: list[float] = []

    def clock(done: int, steps: int, line: object) -> None:
        if done in (FIRST, STEPS):
            torch.cuda.synchronize()
            times.append(time.perf_counter())

    recipe = Recipe.of(method, epochs=1, batch=batch, replay=replay, views=0, precision="bfloat16")
    train(method, images, recipe, progress=clock)
    return (times[1] - times[0]) / (STEPS - FIRST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    asked = parser.parse_args()
    torch.manual_seed(0)
    clip = Clip(ClipConfig.named("ViT-B-16")).to("cuda")
    about = (torch.cuda.get_device_name(), torch.__version__, platform.python_version(), date.today())
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with asked.out.open("w", newline="") as file:
        table = csv.writer(file)
        head = ("method", "recorded", "eager_ms", "step_ms", "device", "torch", "python", "date")
        table.writerow(head)
        for name in asked.methods:
            learns = build_method(
                name, clip, ("a", "b"), roles=roles_of(clip.config), ids=token_ids(clip.config, 2)
            )
            if not learns.trainable_parameters:
                continue
            seconds = [step_seconds(name, clip, replay) for replay in (False, True)]
            recorded = "no" if METHODS[name].dynamic else "yes"
            row = (name, recorded, *(f"{1000 * s:.2f}" for s in seconds), *about)
            table.writerow(row)
            file.flush()
            print(*row[:4], flush=True)


if __name__ == "__main__":
    main()
