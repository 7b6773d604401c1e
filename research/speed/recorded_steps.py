"""Seconds of a training step of every method, launched kernel by kernel and recorded (needs a GPU).

    python research/speed/recorded_steps.py --csv research/results/recorded_steps.csv

A random ViT-B/16 in bfloat16, 50 classes, the method's own batch (at most 64), 60 steps without the first 10.
`recorded` is "no" where a method says that its steps are dynamic.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from measure.script import arguments, record
from measure.task import noise, roles_of, token_ids

from dear.clip.config import ClipConfig
from dear.clip.model import Clip
from dear.methods import METHODS, build_method
from dear.runs.recipe import Recipe
from dear.train.run import train

CLASSES, STEPS, FIRST = 50, 60, 10


def step_seconds(name: str, clip: Clip, replay: bool) -> float:
    kind = METHODS[name]
    batch = min(64, Recipe.of(kind).batch)
    side = clip.config.vision.image_size
    images = noise(CLASSES, batch * STEPS, side, side, domains="ab")
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
    options = arguments(__doc__, methods=list(METHODS), csv=Path)
    torch.manual_seed(0)
    clip = Clip(ClipConfig.named("ViT-B-16")).to("cuda")
    roles, ids = roles_of(clip.config), token_ids(clip.config, 2)
    for name in options.methods:
        if build_method(name, clip, ("a", "b"), roles=roles, ids=ids).trainable_parameters:
            eager, recorded = (f"{1000 * step_seconds(name, clip, replay):.2f}" for replay in (False, True))
            row = {"method": name, "recorded": "no" if METHODS[name].dynamic else "yes"}
            record(options.csv, [row | {"eager_ms": eager, "step_ms": recorded}], "cuda", machine_last=True)


if __name__ == "__main__":
    main()
