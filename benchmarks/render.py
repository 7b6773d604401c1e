"""How many images per second the attribute world renders, and how many captions it writes.

python benchmarks/render.py --device cpu --threads 2 --csv benchmarks/results/render.csv
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch
from measure.clock import medians

from dear import world
from dear.workflows.speed import add_rows, machine
from dear.world.captions import CaptionTable


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=None, help="images per call (CPU 1024, GPU 4096)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to measure")
    parser.add_argument("--csv", type=Path, default=None, help="append the figures to this table")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    batch = options.batch or (4096 if device.type == "cuda" else 1024)
    generator = torch.Generator(device).manual_seed(1)
    scenes = world.sample(batch, generator, device)
    table = CaptionTable.build().to(device)
    works = {"images": lambda: world.render(scenes), "captions": lambda: table.captions(scenes, generator)}
    found = medians(works, 3, warm_up=2, at_least=options.seconds)
    images, captions = batch / found["images"], batch / found["captions"]
    here = machine(device)
    row = {
        "date": here["date"],
        "machine": here["machine"],
        "device": device.type,
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "batch": str(batch),
        "images_per_s": f"{images:.0f}",
        "captions_per_s": f"{captions:.0f}",
    }
    print(f"{images:,.0f} images/s, {captions:,.0f} captions/s on {row['machine']} ({device.type})")
    if options.csv:
        add_rows(options.csv, [row])


if __name__ == "__main__":
    main()
