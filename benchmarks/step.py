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

from itertools import product
from pathlib import Path

import torch
from measure.script import DEVICE, arguments, record
from measure.steps import matrix_rate, step_rows

import dear
from dear.clip.variant import matrix_dtype


def main() -> None:
    options = arguments(
        __doc__,
        device=DEVICE,
        shape="ViT-B-16",
        batch=[4, 16, 32],
        classes=[10, 50, 100, 500, 1000],
        repeats=7,
        warm_up=3,
        precision="auto",
        literal_precision=(str, "of the literal step, if not the same"),
        mmrl=(Path, "a copy of github.com/yunncheng/MMRL"),
        one_by_one=(False, "also ours, launched kernel by kernel"),
        csv=Path,
    )
    device = torch.device(options.device)
    torch.manual_seed(0)
    clip = dear.Clip(dear.ClipConfig.named(options.shape)).to(device)
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
        where = {"shape": options.shape, "matrix_tflops": round(rate / 1e12, 1)}
        record(options.csv, [{**where, **row} for row in rows], device)


if __name__ == "__main__":
    main()
