"""The training step of DeAR's recipe `strong` against the step of `paper`, at the same batch.

    python benchmarks/preset_step.py --device cuda --repeats 15 --csv benchmarks/results/preset_step.csv

A random CLIP of the ViT-B/16 size; the steps take turns and medians count, as in step.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure.clock import medians
from measure.task import SpeedTask

import dear
from dear.workflows.speed import add_rows, machine


def main() -> None:
    """Measure, print, and add rows to a CSV file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="ViT-B-16", choices=dear.ClipConfig.names())
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    clip = dear.Clip(dear.ClipConfig.named(options.shape)).to(device)
    for batch in options.batch:
        steps = {
            name: SpeedTask(clip, batch, options.classes, preset=name).ours() for name in ("paper", "strong")
        }
        found = medians({name: way.run for name, way in steps.items()}, options.repeats)
        times = {name: 1000 * seconds / steps[name].count for name, seconds in found.items()}
        ratio = times["strong"] / times["paper"]
        row = {"shape": options.shape, "batch": batch, "classes": options.classes}
        row |= {f"{name}_ms": round(value, 3) for name, value in times.items()} | {"ratio": round(ratio, 3)}
        print(row)
        if options.csv:
            add_rows(options.csv, [machine(device) | row])


if __name__ == "__main__":
    main()
