"""Images per second of plain CLIP and of DeAR fused, compared with transformers and timm at the same shape.

    python benchmarks/inference.py --device cuda --csv benchmarks/results/inference.csv
    python benchmarks/inference.py --device cpu --batch 1 8 --repeats 5
    python benchmarks/inference.py --device cpu --cpu-time --batch 1 --repeats 3 --shape ViT-L-14

Random weights, pixels on the device already, each code in the precision of its matrices (bfloat16 on a GPU,
float32 on a CPU), models taking turns. DeAR's work ends with the scores of both its modes for 100 classes.
timm is also compiled for the batch sizes after `--compile`, each on its own.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from measure.inference import inference
from measure.script import DEVICE, arguments, record
from measure.task import SpeedTask
from torch.utils.benchmark import timer

import dear


def main() -> None:
    options = arguments(
        __doc__,
        device=DEVICE,
        shape=["ViT-B-16"],
        batch=[1, 32, 256, 1024],
        compile=[256],
        precision="auto",
        classes=100,
        repeats=15,
        cpu_time=(False, "processor time, for a machine that does other work as well"),
        csv=Path,
    )
    clock = time.process_time if options.cpu_time else timer
    for shape in options.shape:
        torch.manual_seed(0)
        clip = dear.Clip(dear.ClipConfig.named(shape)).to(options.device)
        task = SpeedTask(clip, 1, options.classes, options.precision)
        for batch in options.batch:
            others = ("transformers", "timm", *(["timm compiled"] if batch in options.compile else []))
            rows = inference(task, [batch], others, options.repeats, clock)
            record(options.csv, [{"shape": shape, **row} for row in rows], options.device)


if __name__ == "__main__":
    main()
