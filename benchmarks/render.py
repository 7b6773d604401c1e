"""How many images per second the attribute world renders, and how many captions it writes.

python benchmarks/render.py --device cpu --threads 2 --csv benchmarks/results/render.csv
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dear import world
from dear._io.files import write_atomic
from dear.world.captions import CaptionTable


def timed(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median seconds of one call, after two to warm up."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[len(times[2:]) // 2]


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def append_row(path: Path, row: dict[str, str]) -> None:
    """Add a row to a CSV, keeping the rows of other machines."""
    rows = list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []
    lines = [",".join(row)] + [",".join(entry.values()) for entry in [*rows, row]]
    write_atomic(path, "\n".join(lines) + "\n")


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
    images = batch / timed(lambda: world.render(scenes), device, options.seconds)
    captions = batch / timed(lambda: table.captions(scenes, generator), device, options.seconds / 2)
    row = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(device).replace(",", " "),
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
        append_row(options.csv, row)


if __name__ == "__main__":
    main()
