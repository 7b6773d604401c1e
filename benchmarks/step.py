"""Training steps side by side: MMRL++'s own, DeAR's written without its savings, and ours.

    python benchmarks/step.py --device cuda --mmrl PATH --csv benchmarks/results/step.csv
    python benchmarks/step.py --device cpu --batch 16 --classes 10 --repeats 3

A random CLIP of the ViT-B/16 size. Every step is forward, backward and AdamW on a batch of pixels that are
on the device already; MMRL++'s is its trainer's `forward_backward` from a copy of its repository, in the
precision it ships with. The steps take turns and medians count. "dear" on a GPU is the step as training
runs it: recorded as a CUDA graph, with the frozen part of several steps computed at once, which is part of
the time. The losses of the literal step and ours are compared before the clock starts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure.steps import matrix_rate, step_rows

import dear
from dear.clip.precision import matrix_dtype
from dear.workflows.speed import add_rows, machine


def main() -> None:
    """Measure, print, and add rows to a CSV file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="ViT-B-16", choices=dear.ClipConfig.names())
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 50, 100, 500, 1000])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--precision", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--literal-precision", help="of the literal step, if not the same")
    parser.add_argument("--mmrl", type=Path, help="a copy of github.com/yunncheng/MMRL")
    parser.add_argument("--one-by-one", action="store_true", help="also ours, launched kernel by kernel")
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    clip = dear.Clip(dear.ClipConfig.named(options.shape)).to(device)
    rate = matrix_rate(device, matrix_dtype(options.precision, device))
    print(f"matrix products: {rate / 1e12:.2f} TFLOP/s")
    ways = ("literal", "dear, launched one by one", "dear") if options.one_by_one else ("literal", "dear")
    for batch in options.batch:
        for classes in options.classes:
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
            for row in rows:
                print(", ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
            if options.csv:
                where = {**machine(device), "shape": options.shape, "matrix_tflops": round(rate / 1e12, 1)}
                add_rows(options.csv, [{**where, **row} for row in rows])


if __name__ == "__main__":
    main()
