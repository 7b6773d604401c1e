"""DeAR's training step: compared with others, its presets, its losses, its growth, and its kernels.

    python benchmarks/step.py compare --device cuda --mmrl PATH --csv benchmarks/results/step.csv
    python benchmarks/step.py compare --device cpu --batch 16 --classes 10 --repeats 3
    python benchmarks/step.py presets --device cuda --repeats 15 --csv benchmarks/results/preset_step.csv
    python benchmarks/step.py losses --device cuda --csv benchmarks/results/losses.csv
    python benchmarks/step.py growth --device cuda --csv benchmarks/results/growth.csv
    python benchmarks/step.py kernels --batch 16 --classes 50

A random CLIP of a known shape (for `presets` also `mini`). A step is forward, backward, and AdamW on pixels
that are on the device. Steps take turns and medians count.

- `compare`: MMRL++'s own step (its trainer's `forward_backward`, from a copy of its repository, in the
  precision it ships with), DeAR's written without savings, and ours as training runs it: on a GPU recorded as
  a CUDA graph, with the frozen part of several steps computed at once, which is part of the time.
- `presets`: the steps of DeAR's presets at the same batch; on a CPU in processor time.
- `losses`: 50 steps without savings and ours, from the same start on the same batches, at the recipe's rate:
  a difference in any gradient would grow from step to step.
- `growth`: batch, classes, and resolution grow one at a time, from 16 images, 50 classes, and 224 pixels.
  Operations are counted as in docs/performance.md.
- `kernels`: the kernels of a step, or with `--inference` of answers, by their time on the GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measure.clock import medians, peak
from measure.count import dear_step
from measure.literal import LiteralStep
from measure.script import DEVICE, add_options, parser_of, record
from measure.steps import matrix_rate, step_rows
from measure.task import SpeedTask
from torch.utils.benchmark import timer

import dear
from dear.clip.variant import matrix_dtype

PRESETS = ("paper", "quick", "strong")
START = {"batch": 16, "classes": 50, "pixels": 224}
GROWTH = {"batch": (4, 16, 64, 128), "classes": (10, 100, 1000), "pixels": (224, 336, 448)}


def backbone(shape: str, device: str) -> dear.Clip:
    """`mini`, or random weights of a shape."""
    torch.manual_seed(0)
    clip = dear.load("mini") if shape == "mini" else dear.Clip(dear.ClipConfig.named(shape))
    return clip.to(device)


def compare(options: argparse.Namespace) -> None:
    clip = backbone(options.shape, options.device)
    device = clip.device
    rate = matrix_rate(device, matrix_dtype(options.precision, device))
    print(f"matrix products: {rate / 1e12:.2f} TFLOP/s")
    ways = ("literal", "dear, launched one by one", "dear") if options.one_by_one else ("literal", "dear")
    for batch, classes in product(options.batch, options.classes):
        rows = step_rows(
            clip,
            batch,
            classes,
            options.precision,
            options.mmrl,
            options.repeats,
            rate if device.type == "cuda" else None,  # on a shared CPU it says little
            ways,
            options.warm_up,
            options.literal_precision,
        )
        facts = {"shape": options.shape, "matrix_tflops": round(rate / 1e12, 1)}
        record(options.csv, [{**facts, **row} for row in rows], device)


def presets(options: argparse.Namespace) -> None:
    clip = backbone(options.shape, options.device)
    on_cpu = clip.device.type == "cpu"
    for batch in options.batch:
        steps = {name: SpeedTask(clip, batch, options.classes, preset=name).ours() for name in PRESETS}
        works = {name: step.run for name, step in steps.items()}
        clock = time.process_time if on_cpu else timer
        seconds = medians(works, options.repeats, warm_up=1 if on_cpu else 3, clock=clock)
        row = {"shape": options.shape, "batch": batch, "classes": options.classes}
        row |= {f"{name}_ms": round(1000 * seconds[name] / steps[name].count, 3) for name in PRESETS}
        record(options.csv, [row], clip.device)


def losses(options: argparse.Namespace) -> None:
    clip = backbone(options.shape, options.device)
    for precision in options.precision:
        task = SpeedTask(clip, options.batch, options.classes, precision)
        rows = train_both(task, options.steps, options.lr)
        facts = {"shape": options.shape, "batch": options.batch, "classes": options.classes}
        record(options.csv, [{**facts, **row} for row in rows], clip.device)
        largest = max(float(row["relative_difference"]) for row in rows)
        print(f"largest relative difference of the losses in {precision}: {largest:.2e}", flush=True)


def train_both(task: SpeedTask, steps: int, lr: float) -> list[dict[str, Any]]:
    """One row per step: both losses and their relative difference."""
    rows = []
    dtype = task.dtype
    literal = LiteralStep(task.model, task.ids, task.clip)
    learned = (literal.learned.values(), task.model.parameters())
    optimizers = [torch.optim.AdamW(tensors, lr, weight_decay=5e-4) for tensors in learned]
    for step in range(1, steps + 1):
        start = (step - 1) % task.at_once * task.batch
        pixels, labels = (tensor[start : start + task.batch] for tensor in (task.pixels, task.labels))
        with torch.autocast(task.device.type, dtype, enabled=dtype != torch.float32):
            literal_loss = literal.loss(pixels, labels)
        our_loss = task.model.loss(pixels, labels).total
        for loss, optimizer in zip((literal_loss, our_loss), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        expected, actual = literal_loss.item(), our_loss.item()
        rows.append(
            {
                "precision": str(dtype).removeprefix("torch."),
                "step": step,
                "literal": f"{expected:.7f}",
                "ours": f"{actual:.7f}",
                "relative_difference": f"{abs(actual - expected) / abs(expected):.2e}",
            }
        )
    return rows


def growth(options: argparse.Namespace) -> None:
    shape = dear.ClipConfig.named(options.shape)
    for name, values in GROWTH.items():
        for value in values:
            size = {**START, name: value}
            vision = dataclasses.replace(shape.vision, image_size=size["pixels"])
            clip = dear.Clip(dataclasses.replace(shape, vision=vision)).to(options.device)
            row = measure_step(clip, size, options.repeats)
            record(options.csv, [{"shape": options.shape, "grows": name, **row}], clip.device)


def measure_step(clip: dear.Clip, size: dict[str, int], repeats: int) -> dict[str, Any]:
    """Time, memory, and operations of a step."""
    task = SpeedTask(clip, size["batch"], size["classes"])
    steps = task.ours()
    peak_bytes = peak(steps.run, clip.device)
    warm_up = 3 if clip.device.type == "cuda" else 1
    seconds = medians({"step": steps.run}, repeats, warm_up)["step"] / steps.count
    words = int(task.ids.argmax(-1).max()) + 1
    count = dear_step(clip.config, size["batch"], size["classes"], words)
    shares = {f"share_{name}": round(n / count.total, 4) for name, n in vars(count).items()}
    return {
        **size,
        "ms": round(1000 * seconds, 3),
        "peak_mb": "" if peak_bytes is None else round(peak_bytes / 2**20),
        "teraoperations": round(count.total / 1e12, 4),
        **shares,
    }


def kernels(options: argparse.Namespace) -> None:
    task = SpeedTask(backbone("ViT-B-16", "cuda"), options.batch, options.classes)
    if options.inference:
        pixels = torch.randn(options.inference, 3, 224, 224, device="cuda")
        print_kernels(lambda: task.model.all_logits(pixels), options.rows)
    else:
        steps = task.replayed()
        print(f"the time of {steps.count} steps:")
        print_kernels(steps.run, options.rows)


def print_kernels(work: Callable[[], object], rows: int) -> None:
    """Run once under the profiler and print the kernels that took longest."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in events)
    print(f"{total:.0f} us in {sum(event.count for event in events)} kernels")
    for event in events[:rows]:
        each = event.device_time_total / event.count
        print(f"{event.device_time_total:9.0f} us {event.count:6d} x {each:7.1f}  {event.key[:90]}")


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    common = {"device": DEVICE, "shape": "ViT-B-16", "csv": Path}
    options: dict[Callable[[argparse.Namespace], None], dict[str, Any]] = {
        compare: {
            **common,
            "batch": [4, 16, 32],
            "classes": [10, 50, 100, 500, 1000],
            "repeats": 7,
            "warm_up": 3,
            "precision": "auto",
            "literal_precision": (str, "of the literal step, if not the same"),
            "mmrl": (Path, "a copy of github.com/yunncheng/MMRL"),
            "one_by_one": (False, "also ours, launched kernel by kernel"),
        },
        presets: {**common, "batch": [4, 16], "classes": 50, "repeats": 9},
        losses: {
            **common,
            "precision": ["float32", "bfloat16"],
            "steps": 50,
            "batch": 16,
            "classes": 50,
            "lr": 1e-3,
        },
        growth: {**common, "repeats": 5},
        kernels: {
            "batch": 16,
            "classes": 50,
            "inference": (0, "images: DeAR's inference instead of the step"),
            "rows": 40,
        },
    }
    for command, defaults in options.items():
        subparser = commands.add_parser(command.__name__)
        subparser.set_defaults(run=command)
        add_options(subparser, **defaults)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
