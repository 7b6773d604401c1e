"""Images per second of plain CLIP and of DeAR fused, beside transformers' and timm's model of the same shape.

    python benchmarks/inference.py --device cuda --csv benchmarks/results/inference.csv
    python benchmarks/inference.py --device cpu --batch 1 8 --repeats 5
    python benchmarks/inference.py --device cpu --cpu-time --batch 1 --repeats 3 --shape ViT-L-14

Random weights, pixels on the device already, each code in the precision of its matrices (bfloat16 on a GPU,
float32 on a CPU), models taking turns. DeAR's work ends with the scores of both its modes for 100 classes.
timm is also compiled for the batch sizes after `--compile`, each on its own.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from measure.inference import inference
from measure.task import SpeedTask
from torch.utils.benchmark import timer

import dear
from dear.workflows.speed import add_rows, machine


def main() -> None:
    """Measure, print, and add rows to a CSV file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", nargs="+", default=["ViT-B-16"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--compile", type=int, nargs="*", default=[256])
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time, for a machine that does other work as well"
    )
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    for shape in options.shape:
        torch.manual_seed(0)
        clip = dear.Clip(dear.ClipConfig.named(shape)).to(device)
        task = SpeedTask(clip, 1, options.classes, options.precision)
        for batch in options.batch:
            others = ("transformers", "timm", *(["timm compiled"] if batch in options.compile else []))
            clock = time.process_time if options.cpu_time else timer
            rows = inference(task, [batch], others, options.repeats, clock)
            for row in rows:
                print(shape, ", ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
            if options.csv:
                where = {**machine(device), "shape": shape}
                add_rows(options.csv, [{**where, **row} for row in rows])


if __name__ == "__main__":
    main()
