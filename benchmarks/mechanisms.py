"""Every mechanism that exists for speed, switched off alone: what it is worth.

    python benchmarks/mechanisms.py --device cuda --csv benchmarks/results/mechanisms.csv
    OMP_NUM_THREADS=1 python benchmarks/mechanisms.py --device cpu --csv benchmarks/results/mechanisms.csv

A random CLIP of the ViT-B/16 size on a GPU, `mini` on a CPU. The ways of one row take turns and medians
count; `gain` is the time without the mechanism divided by the time with all of them. On a GPU the step is
DeAR's with the preset `paper`, and `torch.compile` of `Block.forward` stands in for the Triton kernels in one
of the ways (the table of docs/performance.md). On a CPU CPU seconds of the process are counted, except for
reading ahead, which saves waiting.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from measure.clock import medians
from measure.script import DEVICE, arguments, record
from measure.task import SpeedTask
from PIL import Image
from torch import Tensor
from torch.utils.benchmark import timer

import dear
from dear.clip.model import Clip
from dear.clip.tower import Block
from dear.clip.towers import Patches
from dear.runs.feature_cache import frozen_features
from dear.runs.model import Model

FORWARD = Block.forward
ALL = "all mechanisms"
Works = Mapping[str, Callable[[], object]]


@cache
def compiled_forward() -> Callable[..., Tensor]:
    """`Block.forward` by torch.compile."""
    return torch.compile(FORWARD)


@contextmanager
def changed(*, kernels: bool = True, compiled: bool = False, convolution: bool = False) -> Iterator[None]:
    """Within this block the towers run in another way."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, DEAR_KERNELS=str(int(kernels))))
        if compiled:
            stack.enter_context(mock.patch.object(Block, "forward", compiled_forward()))
        if convolution:
            stack.enter_context(mock.patch.object(Patches, "forward", Patches.as_convolution))
        yield


def step_ways(task: SpeedTask) -> tuple[Works, int]:
    """A group of training steps on a GPU, by name of what is switched off, and how many steps each takes."""
    ways: dict[str, dict[str, Any]] = {
        ALL: {},
        "kernels: torch.compile instead": {"kernels": False, "compiled": True},
        "kernels: plain instead": {"kernels": False},
        "patches as one product": {"convolution": True},
    }
    works: dict[str, Callable[[], object]] = {}
    for name, changes in ways.items():
        with changed(**changes):
            steps = task.replayed()

        def run(work: Callable[[], object] = steps.run, changes: Mapping[str, Any] = changes) -> None:
            with changed(**changes):  # the frozen part of the steps is not recorded
                work()

        works[name] = run
    works["update in the recording"] = task.replayed(update=False).run
    for name, one in (("frozen part ahead", task.replayed(ahead=False)), ("recorder", task.eager())):
        works[name] = lambda run=one.run: [run() for _ in range(steps.count)]
    return works, steps.count


def rows_of(works: Works, unit: float, where: Mapping[str, Any], repeats: int, **timing: Any) -> list[Any]:
    """A row for each way; `unit` is how many items one run has."""
    seconds = medians(works, repeats, **timing)
    return [
        {
            **where,
            "without": name,
            "ms": round(1000 * value / unit, 3),
            "gain": round(value / seconds[ALL], 3),
        }
        for name, value in seconds.items()
    ]


def inference_ways(clip: Clip, batch: int) -> Works:
    """DeAR's answers for a batch on a GPU."""
    model = Model(SpeedTask(clip, 16, 50).model)
    pixels = torch.randn(batch, 3, 224, 224, device=clip.device)

    def answer(recorded: bool = True, **changes: Any) -> None:
        bound = model.bound
        with torch.no_grad(), changed(**changes):
            if recorded:
                model.forward(pixels)
            else:
                bound.all_logits(pixels)

    ways: dict[str, Callable[[], object]] = {ALL: answer, "recorder": lambda: answer(recorded=False)}
    if batch > 64:  # too large to be recorded
        ways = {ALL: answer, "kernels": lambda: answer(kernels=False)}
    return ways


@contextmanager
def folder_of_photos(count: int) -> Iterator[list[Path]]:
    """JPEG files of 640 x 480 noise."""
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.jpg" for number in range(count)]
        for file in files:
            small = generator.integers(0, 256, (48, 64, 3), np.uint8)
            Image.fromarray(small).resize((640, 480)).save(file, quality=90)
        yield files


def reading_ways(clip: Clip, files: list[Path]) -> Works:
    """Image files to features, with batches read ahead or not."""

    def encode(depth: int) -> None:
        with ExitStack() as stack:
            if depth:
                stack.enter_context(mock.patch("dear.data.read_ahead._DEPTH", depth))
                stack.enter_context(mock.patch("dear.data.read_ahead._GPU_DEPTH", depth))
            else:
                plain = mock.patch("dear.data.batches.read_ahead", lambda images, *_: nullcontext(images))
                stack.enter_context(plain)
            frozen_features(clip, files)

    depths = {ALL: 1, "reading ahead": 0}
    if clip.device.type == "cuda":
        depths = {ALL: 2, "second batch ahead": 1, "reading ahead": 0}
    return {name: lambda depth=depth: encode(depth) for name, depth in depths.items()}


def main() -> None:
    options = arguments(
        __doc__, device=DEVICE, batch=[4, 16], classes=[50, 500], files=512, repeats=20, csv=Path
    )
    device = torch.device(options.device)
    torch.manual_seed(0)

    def note(rows: list[Any]) -> None:
        record(options.csv, rows, device)

    if device.type == "cuda":
        clip = dear.Clip(dear.ClipConfig.named("ViT-B-16")).to(device)
        for batch, classes in product(options.batch, options.classes):
            works, count = step_ways(SpeedTask(clip, batch, classes))
            where = {"work": "training step", "batch": batch, "classes": classes}
            note(rows_of(works, count, where, options.repeats))
        for batch in (1, 16, 256):
            where = {"work": "inference", "batch": batch, "classes": 50}
            note(rows_of(inference_ways(clip, batch), 1, where, options.repeats))
        clip = clip.cast(torch.bfloat16)
    else:
        clip = dear.load("mini")
    with folder_of_photos(options.files) as files:
        where = {"work": "image files to features", "batch": 0, "classes": 0}
        note(rows_of(reading_ways(clip, files), len(files), where, 5, warm_up=1, clock=timer))


if __name__ == "__main__":
    main()
