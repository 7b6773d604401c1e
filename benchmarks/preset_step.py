"""The training steps of DeAR's presets at the same batch.

    python benchmarks/preset_step.py --device cuda --repeats 15 --csv benchmarks/results/preset_step.csv
    OMP_NUM_THREADS=1 python benchmarks/preset_step.py --device cpu --shape mini --batch 4 8 16 --classes 6 \
        --repeats 5 --csv benchmarks/results/preset_step.csv

A random CLIP of a known shape, or `mini`; the steps take turns and medians count, as in step.py. On a CPU CPU
seconds of the process are counted, which a busy machine changes little.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from measure.clock import medians
from measure.script import DEVICE, arguments, record
from measure.task import SpeedTask
from torch.utils.benchmark import timer

import dear

SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {"preset": "paper"},
    "quick": {"preset": "quick"},
    "strong": {"preset": "strong"},
}


def main() -> None:
    options = arguments(
        __doc__, device=DEVICE, shape="ViT-B-16", batch=[4, 16], classes=50, repeats=9, csv=Path
    )
    on_cpu = options.device == "cpu"
    torch.manual_seed(0)
    mini = options.shape == "mini"
    clip = (dear.load("mini") if mini else dear.Clip(dear.ClipConfig.named(options.shape))).to(options.device)
    for batch in options.batch:
        tasks = {name: SpeedTask(clip, batch, options.classes, **one) for name, one in SETTINGS.items()}
        steps = {name: task.ours() for name, task in tasks.items()}
        works = {name: way.run for name, way in steps.items()}
        clock = time.process_time if on_cpu else timer
        found = medians(works, options.repeats, warm_up=1 if on_cpu else 3, clock=clock)
        row = {"shape": options.shape, "batch": batch, "classes": options.classes}
        row |= {f"{name}_ms": round(1000 * found[name] / steps[name].count, 3) for name in SETTINGS}
        record(options.csv, [row], options.device)


if __name__ == "__main__":
    main()
