"""Every mechanism that exists for speed, switched off alone: what it is worth.

    python benchmarks/mechanisms.py --device cuda --csv benchmarks/results/mechanisms.csv
    OMP_NUM_THREADS=1 python benchmarks/mechanisms.py --device cpu --csv benchmarks/results/mechanisms.csv

On a GPU: a random CLIP of the ViT-B/16 size; the step is DeAR's with the preset `paper`. With `--compiled`,
`torch.compile` of `Block.forward` replaces the Triton kernels in one of the ways. On a CPU: `mini`, or
`--backbone`. The ways of one row take turns and medians count; `gain` is the time without the mechanism
divided by the time with all of them. On a CPU the time is that of the processor, except for reading ahead
and what uses all cores, where it is that of waiting.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import time
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
from measure.task import SpeedTask, roles_of
from PIL import Image
from torch import Tensor
from torch.utils.benchmark import timer

import dear
from dear.clip.model import Clip
from dear.clip.tower import Block
from dear.clip.towers import Patches
from dear.data.images import ListedImages
from dear.methods import DeAR, ZeroShot
from dear.runs.feature_cache import frozen_features
from dear.runs.folder import load_run
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.train.frozen import FrozenViews
from dear.train.run import train
from dear.utils.parallel import usable_cores

FORWARD = Block.forward
ALL = "all mechanisms"
Work = Callable[[], object]
Works = Mapping[str, Work]


@cache
def compiled_forward() -> Callable[..., Tensor]:
    """`Block.forward` by torch.compile."""
    return torch.compile(FORWARD)


@contextmanager
def changed(
    *, kernels: bool = True, compiled: bool = False, convolution: bool = False, one_stream: bool = False
) -> Iterator[None]:
    """Within this block the towers run in another way."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, DEAR_KERNELS=str(int(kernels))))
        if compiled:
            stack.enter_context(mock.patch.object(Block, "forward", compiled_forward()))
        if convolution:
            stack.enter_context(mock.patch.object(Patches, "forward", Patches.as_convolution))
        if one_stream:
            stack.enter_context(mock.patch("dear.methods.dear.run_concurrently", one_after_the_other))
        yield


def one_after_the_other(first: Work, second: Work, device: torch.device) -> tuple[object, object]:
    """As `run_concurrently`, on one stream."""
    return first(), second()


def step_ways(task: SpeedTask, compiled: bool) -> tuple[Works, int]:
    """A group of training steps on a GPU, by name of what is switched off, and how many steps each takes."""
    ways: dict[str, dict[str, Any]] = {
        ALL: {},
        "kernels: plain instead": {"kernels": False},
        "patches as one product": {"convolution": True},
        "both towers at once": {"one_stream": True},
    }
    if compiled:
        ways["kernels: torch.compile instead"] = {"kernels": False, "compiled": True}
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
    pixels = torch.randn(batch, 3, 224, 224, device=clip.device)
    model = Model(SpeedTask(clip, 16, 50).model)
    plain = Model(SpeedTask(copy.deepcopy(clip), 16, 50).model)  # records its own graphs

    def answer(model: Model = model, **changes: Any) -> None:
        with torch.no_grad(), changed(**changes):
            model.forward(pixels)

    def unrecorded() -> None:
        with torch.no_grad():
            model.bound.all_logits(pixels)

    ways = {ALL: answer, "kernels: plain instead": lambda: answer(plain, kernels=False)}
    return ways if batch > 256 else {**ways, "recorder": unrecorded}


@contextmanager
def folder_of_photos(count: int) -> Iterator[list[Path]]:
    """JPEG files of 640 x 480 noise; from the 257th on they are links to the first ones."""
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.jpg" for number in range(count)]
        for number, file in enumerate(files):
            if number >= 256:
                file.hardlink_to(files[number % 256])
                continue
            small = generator.integers(0, 256, (48, 64, 3), np.uint8)
            Image.fromarray(small).resize((640, 480)).save(file, quality=90)
        yield files


def reading_ways(clip: Clip, files: list[Path]) -> Works:
    """Image files to features, with batches read ahead or not, and decoded on the device or not."""

    def encode(depth: int, decoder: bool = True) -> None:
        with ExitStack() as stack:
            if not decoder:
                stack.enter_context(mock.patch("dear.images.views.MAX_CPU_IMAGES", len(files)))
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
    ways = {name: lambda depth=depth: encode(depth) for name, depth in depths.items()}
    return {**ways, "decoder of the GPU": lambda: encode(2, decoder=False)} if len(depths) == 3 else ways


def feature_ways(clip: Clip, batch: int) -> Works:
    """Image features of pixels on a CPU, with products by oneDNN or by the library PyTorch chooses."""
    size = clip.config.vision.image_size
    pixels = torch.randn(batch, 3, size, size)

    def encode(**changes: Any) -> None:
        with torch.no_grad(), changed(**changes):
            clip.encode_image(pixels)

    return {ALL: encode, "products by oneDNN": lambda: encode(kernels=False)}


def training_ways(clip: Clip, files: list[Path]) -> Works:
    """A training of DeAR on fixed views of 16 images for 20 epochs: frozen stages held, or computed again."""
    images = ListedImages(tuple(files[:16]), torch.arange(16) % 4, tuple("abcd"))
    recipe = Recipe.of(DeAR, epochs=20, views=4)

    def run(**limit: int) -> None:
        method = DeAR(clip, images.classes, roles=roles_of(clip.config))
        train(method, images, recipe, views=FrozenViews(method, images, recipe, **limit))

    return {ALL: run, "frozen stages held": lambda: run(limit_bytes=0)}


def answering_ways(clip: Clip, files: list[Path]) -> Works:
    """Zero-shot logits of image files whose features are cached, or are computed again."""
    model = Model(ZeroShot(clip, ["cat", "dog"]))
    model.logits(files)
    return {ALL: lambda: model.logits(files), "feature cache": lambda: model.logits(files, cached=False)}


@contextmanager
def folder_of_run(clip: Clip, backbone: str) -> Iterator[Works]:
    """Loading a run whose backbone's fingerprint is cached, or is computed again."""
    with tempfile.TemporaryDirectory() as folder:
        images = ListedImages(tuple([Image.new("RGB", (8, 8))] * 4), torch.arange(4) % 2, ("cat", "dog"))
        train(ZeroShot(clip, images.classes), images, out=Path(folder) / "run")

        def load(cached: bool = True) -> None:
            with ExitStack() as stack:
                if not cached:
                    stack.enter_context(mock.patch("dear.runs.folder.read_digests", return_value=None))
                load_run(Path(folder) / "run", backbone)

        load()
        yield {ALL: load, "fingerprint cache": lambda: load(cached=False)}


READ = """
import sys, time
from pathlib import Path
from dear.images.open import plain_jpeg
from dear.utils.memory import reuse_freed_memory
if sys.argv[1] == "keep":
    reuse_freed_memory()
files = sorted(Path(sys.argv[2]).glob("*.jpg"))
held = [plain_jpeg(file) for file in files]
began = time.process_time()
for _ in range(8):
    held = [plain_jpeg(file) for file in files]
print(time.process_time() - began)
"""


FIT = """
import sys, time
from contextlib import nullcontext
from unittest import mock
import threadpoolctl
import torch
from dear.methods.logistic import fit_logistic
generator = torch.Generator().manual_seed(0)
features = torch.nn.functional.normalize(torch.randn(104, 384, generator=generator) + 0.5, dim=1)
labels = torch.arange(104) % 8
if sys.argv[1] == "plain":
    threadpoolctl.threadpool_limits = lambda *_, **__: nullcontext()
fit_logistic(features, labels, 8, 100.0)
began = time.perf_counter()
for _ in range(5):
    fit_logistic(features, labels, 8, 100.0)
print(time.perf_counter() - began)
"""


ENCODE = """
import sys, time
from dear.utils.parallel import let_waiting_threads_sleep
if sys.argv[1] == "keep":
    let_waiting_threads_sleep()
import torch
import dear
clip = dear.load(sys.argv[2])
pixels = torch.randn(16, 3, clip.config.vision.image_size, clip.config.vision.image_size)
with torch.no_grad():
    clip.encode_image(pixels)
    began = time.perf_counter()
    for _ in range(20):
        clip.encode_image(pixels)
print(time.perf_counter() - began)
"""


@contextmanager
def busy_cores() -> Iterator[None]:
    """Beside as many programs that never wait as there are cores, of another user as it were."""
    command = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(command, start_new_session=True) for _ in range(usable_cores())]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def sharing_rows(backbone: str, repeats: int) -> list[Any]:
    """Rows for image features with all cores, alone and beside other programs, in waiting time."""
    mechanism = "waiting threads sleep soon"
    alone = {"work": "image features, all cores", "batch": 16, "classes": 0}
    rows = process_rows(alone, mechanism, ENCODE, 20, repeats, backbone)
    with busy_cores():
        shared = {**alone, "work": "image features beside other programs"}
        return rows + process_rows(shared, mechanism, ENCODE, 20, repeats, backbone)


def memory_rows(files: list[Path], repeats: int) -> list[Any]:
    """Rows for reading files for the decoder of a GPU."""
    work = {"work": "JPEG files to memory", "batch": 0, "classes": 0}
    return process_rows(work, "freed memory kept", READ, 8 * len(files), repeats, str(files[0].parent))


def fit_rows(repeats: int) -> list[Any]:
    """Rows for a logistic regression with all cores, in waiting time."""
    work = {"work": "logistic regression", "batch": 104, "classes": 8}
    return process_rows(work, "one thread for BLAS", FIT, 5, repeats)


def process_rows(
    work: Mapping[str, Any], mechanism: str, code: str, items: int, repeats: int, *arguments: str
) -> list[Any]:
    """Rows of two ways that take turns, each in a new process, because they last until its end."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    seconds: dict[str, list[float]] = {"keep": [], "plain": []}
    for _ in range(repeats):
        for way, times in seconds.items():
            command = [sys.executable, "-c", code, way, *arguments]
            printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            times.append(float(printed.stdout))
    kept, plain = (sorted(times)[len(times) // 2] for times in seconds.values())
    return [
        {
            **work,
            "without": name,
            "ms": round(1000 * value / items, 4),
            "gain": round(value / kept, 3),
        }
        for name, value in ((ALL, kept), (mechanism, plain))
    ]


def main() -> None:
    options = arguments(
        __doc__, device=DEVICE, batch=[4, 16], classes=[50, 500], files=512, repeats=20, backbone="mini",
        compiled=(False, "also the step with torch.compile instead of the kernels"), csv=Path,
    )  # fmt: skip
    device = torch.device(options.device)
    torch.manual_seed(0)

    def note(rows: list[Any]) -> None:
        record(options.csv, rows, device)

    if device.type == "cuda":
        clip = dear.Clip(dear.ClipConfig.named("ViT-B-16")).to(device)
        for batch, classes in product(options.batch, options.classes):
            works, count = step_ways(SpeedTask(clip, batch, classes), options.compiled)
            where = {"work": "training step", "batch": batch, "classes": classes}
            note(rows_of(works, count, where, options.repeats))
        for batch in (1, 16, 256):
            where = {"work": "inference", "batch": batch, "classes": 50}
            note(rows_of(inference_ways(clip, batch), 1, where, options.repeats))
        clip = clip.cast(torch.bfloat16)
    else:
        clip = dear.load(options.backbone)
    with folder_of_photos(options.files) as files:
        if device.type == "cpu":
            where, timing = {"batch": 4, "classes": 4}, {"warm_up": 1, "clock": time.process_time}
            for images in (1, 16):
                place = {"work": "image features", "batch": images, "classes": 0}
                note(rows_of(feature_ways(clip, images), 1, place, 5, **timing))
            note(rows_of(training_ways(clip, files), 80, {"work": "training step", **where}, 3, **timing))
            where = {"batch": 0, "classes": 2}
            works = answering_ways(clip, files[:64])
            note(rows_of(works, 64, {"work": "answer to an image file", **where}, 3, **timing))
            with folder_of_run(clip, options.backbone) as works:
                note(rows_of(works, 1, {"work": "load a run", **where}, 5, **timing))
            note(memory_rows(files, 3))
            note(fit_rows(3))
            note(sharing_rows(options.backbone, 5))
        where = {"work": "image files to features", "batch": 0, "classes": 0}
        note(rows_of(reading_ways(clip, files), len(files), where, 5, warm_up=1, clock=timer))


if __name__ == "__main__":
    main()
