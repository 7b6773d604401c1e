"""How fast this machine trains, answers and reads images, and how long an adaptation will take on it.

The models have random weights and the images are made up: time does not depend on what they show. The
benchmarks that compare with other code are scripts in `benchmarks/`.
"""

from __future__ import annotations

import datetime
import io
import itertools
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from csv import DictReader, DictWriter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.benchmark import Timer, timer

from dear.clip.config import ClipConfig, last_third
from dear.clip.factory import pick_device
from dear.clip.model import Clip
from dear.data import open_data
from dear.errors import DataError, UsageError
from dear.heads.names import CORE
from dear.heads.roles import RoleMap
from dear.methods import build_method, find_method
from dear.methods.base import Method
from dear.runs.recipe import Recipe
from dear.train.feed import Feed
from dear.train.loop import Loop, StepParts, make_step
from dear.utils.files import write_atomic
from dear.utils.progress import Progress, silent
from dear.utils.text import unknown_name

_MANY = 10**6  # steps: no end comes into sight while they are timed


@dataclass(frozen=True)
class SpeedOptions:
    """What to measure."""

    shape: str = "ViT-B-16"  #: of the towers, as in `ClipConfig.names()`
    method: str = "dear"  #: the method that is trained
    classes: int = 10  #: number of classes
    shots: int = 16  #: images per class of the adaptation whose time is estimated
    batch: int | None = None  #: images per step; None: as in the method's recipe
    test_batch: int | None = None  #: images that are answered at once; None: 250 on a GPU, 4 on a CPU
    precision: str = "auto"  #: as in the recipe
    images: int = 64  #: files that are read

    def __post_init__(self) -> None:
        if self.shape not in ClipConfig.names():
            raise UsageError(unknown_name("shape", self.shape, ClipConfig.names()))
        find_method(self.method)
        least = {"classes": 2, "shots": 1, "batch": 1, "test_batch": 1, "images": 8}
        for name, number in least.items():
            value = getattr(self, name)
            if value is not None and value < number:
                raise UsageError(f"{name} must be at least {number}, got {value}")


def measure_speed(
    *,
    device: str = "auto",
    shape: str = "ViT-B-16",
    method: str = "dear",
    classes: int = 10,
    shots: int = 16,
    batch: int | None = None,
    precision: str = "auto",
    images: int = 64,
    csv: Path | None = None,
    progress: Progress = silent,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure this machine: see `measure` for the result, `SpeedOptions` for the parameters.

    Args:
        device: "auto", "cpu", "cuda", …
        shape: see `SpeedOptions`, also for the parameters up to `images`.
        method: see above.
        classes: see above.
        shots: see above.
        batch: see above.
        precision: see above.
        images: see above.
        csv: file to add the rows to.
        progress: called with (stage, 0, None).
    """
    options = SpeedOptions(shape, method, classes, shots, batch, None, precision, images)
    rows, estimate = measure(options, torch.device(pick_device(device)), progress)
    if csv is not None:
        add_rows(csv, rows)
    return rows, estimate


def measure(
    options: SpeedOptions, device: torch.device, progress: Progress = silent
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Figures with the machine they were measured on, and the estimate of an adaptation.

    A row says what was timed, the images in one run, milliseconds and images per second; the estimate, steps
    and seconds of training on `classes` x `shots` images by the method's own recipe.
    """
    progress("model", 0, None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        clip = Clip(ClipConfig.named(options.shape)).to(device)
    method = _method(options, clip)
    changed = {} if options.batch is None else {"batch": options.batch}
    recipe = Recipe.of(type(method), precision=options.precision, **changed)
    bound = method.in_precision(options.precision)
    where = {**machine(device), "shape": options.shape, "method": options.method, "classes": options.classes}
    where["precision"] = str(bound.clip.visual.dtype).removeprefix("torch.")
    seconds: dict[str, tuple[int, float]] = {}
    with photo_folder(options.images, classes=options.classes) as folder:
        images = open_data(str(folder), "all")
        progress("files", 0, None)
        feed = Feed(images, bound.clip, recipe)
        seconds["read"] = (len(images), _read_seconds(feed))
        if bound.trainable_parameters:
            progress("training", 0, None)
            seconds["train"] = (recipe.batch, _step_seconds(bound, feed, recipe))
    progress("answering", 0, None)
    count = options.test_batch or (250 if device.type == "cuda" else 4)
    pixels = torch.randn(count, 3, *[clip.config.vision.image_size] * 2, device=device)
    with torch.no_grad():
        seconds["answer"] = (count, _median_seconds(lambda: bound.all_logits(pixels)))
    rows = [
        {**where, "what": what, "images": n, "ms": round(1000 * s, 3), "images_per_s": round(n / s, 1)}
        for what, (n, s) in seconds.items()
    ]
    return rows, _estimate(options, recipe, seconds)


def _method(options: SpeedOptions, clip: Clip) -> Method:
    kind, vision = find_method(options.method), clip.config.vision
    roles = None
    if kind.uses_roles:
        roles = RoleMap.uniform("mixed", tuple(last_third(vision.layers)), vision.heads, CORE)
    return build_method(kind.name, clip, [f"class {i}" for i in range(options.classes)], roles=roles)


def _median_seconds(work: Callable[[], object]) -> float:
    """Median seconds of some work; the device is waited for."""
    return float(Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=1.0).median)


def _read_seconds(feed: Feed) -> float:
    """Seconds to read and decode every file of a feed; it keeps them, so there is one run to time."""
    began = timer()
    feed.decoded.batch(range(len(feed.images)))
    return float(timer() - began)


def _step_seconds(method: Method, feed: Feed, recipe: Recipe) -> float:
    """Median seconds of a training step as training takes it on this device."""
    loop = Loop(method, feed, recipe)
    parts = StepParts(method, feed, loop.learned, loop.optimizer, loop.scaler)
    step, numbers = make_step(parts, _MANY, _MANY), itertools.count()
    method.prepare(feed.batches)
    return _median_seconds(lambda: step(next(numbers)))


def _estimate(
    options: SpeedOptions, recipe: Recipe, seconds: Mapping[str, tuple[int, float]]
) -> dict[str, Any]:
    """Time of an adaptation: every file is read once, then the steps of all epochs."""
    trained = options.classes * options.shots
    files, reading = seconds["read"]
    steps = recipe.epochs * -(-trained // recipe.batch) if "train" in seconds else 0
    per_step = seconds.get("train", (0, 0.0))[1]
    return {
        "images": trained,
        "epochs": recipe.epochs if steps else 0,
        "steps": steps,
        "seconds": round(trained * reading / files + steps * per_step, 1),
    }


@contextmanager
def photo_folder(count: int, size: tuple[int, int] = (500, 375), classes: int = 4) -> Iterator[Path]:
    """A folder of JPEG files that compress like photographs: smooth colors with some noise."""
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        for number in range(max(count, classes)):
            coarse = generator.integers(0, 256, (8, 10, 3), dtype=np.uint8)
            smooth = np.asarray(
                Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), dtype=np.int16
            )
            noisy = smooth + generator.integers(-12, 13, smooth.shape, dtype=np.int16)
            folder = Path(name) / f"class {number % classes}"
            folder.mkdir(exist_ok=True)
            image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
            image.save(folder / f"{number}.jpg", quality=90)
        yield Path(name)


def machine(device: torch.device) -> dict[str, Any]:
    """Where and with what a figure was measured."""
    import dear

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dear": dear.__version__,
    }


def _processor() -> str:
    """The processor's name where the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def add_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a CSV file with the same columns; a new one is created."""
    if not rows:
        return
    old: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            reader = DictReader(file)
            if list(reader.fieldnames or []) != list(rows[0]):
                raise DataError(f"{path}: has other columns than these figures; choose another file")
            old = list(reader)
    text = io.StringIO()
    writer = DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows([*old, *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.getvalue())
