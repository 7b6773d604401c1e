"""Images per second from JPEG files to training views on the device: our feed and a PyTorch DataLoader.

    python benchmarks/images.py --device cuda --images 512 --csv benchmarks/results/images.csv

Files of 500 x 375 pixels that compress like photographs. Ours decodes each image once, keeps it as bytes
on the device and crops, resizes, flips and norms there; the loader does all of it with Pillow in worker
processes, in every epoch. Both give views of the same distribution. Later epochs matter most: a run has
ten.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure.images import image_rates

import dear
from dear.workflows.speed import add_rows, machine


def main() -> None:
    """Measure, print, and add rows to a CSV file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[8])
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    clip = dear.Clip(dear.ClipConfig.named("ViT-B-16")).to(device)
    workers = tuple(options.workers)
    rows = image_rates(clip, options.images, options.batch, options.epochs, workers)
    for row in rows:
        print(", ".join(f"{key}: {value}" for key, value in row.items()))
    if options.csv:
        add_rows(options.csv, [{**machine(device), **row} for row in rows])


if __name__ == "__main__":
    main()
