"""Images per second that an adapted ViT-B/16 answers in every mode, from bytes on the device to answers.

    python benchmarks/evaluate.py --device cuda --precision bfloat16 --csv evaluate.csv

Decoding is not in it: images are bytes already. The rates of docs/scaling.md come from here.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import time
from pathlib import Path

import torch

import dear
from dear.clip.images import normalize
from dear.heads.roles import RoleMap
from dear.methods import DeAR
from dear.methods.base import in_precision


def main() -> None:
    """Measure, print, and add a row to a CSV file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    clip = dear.Clip(dear.ClipConfig.named("ViT-B-16")).to(device).requires_grad_(False)
    ids = torch.randint(300, 40_000, (options.classes, 12))
    ids[:, 0], ids[:, -1] = 49_406, 49_407
    model = DeAR(clip, [f"class {n}" for n in range(options.classes)], roles=RoleMap.table2(), ids=ids)
    pixels = torch.randint(0, 256, (options.batch, 3, 224, 224), dtype=torch.uint8, device=device)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    seconds = []
    model = in_precision(model, options.precision)
    with torch.no_grad():
        for _ in range(options.repeats + 2):  # the first two warm up
            wait()
            began = time.perf_counter()
            for scores in model.all_logits(normalize(pixels, clip.config.mean, clip.config.std)).values():
                scores.argmax(dim=-1)
            wait()
            seconds.append(time.perf_counter() - began)
    rate = options.batch / statistics.median(seconds[2:])
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    row = {
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "torch": torch.__version__,
        "dear": dear.__version__,
        "shape": "ViT-B-16",
        "batch": options.batch,
        "classes": options.classes,
        "precision": options.precision,
        "images_per_s": f"{rate:.0f}",
    }
    print(", ".join(f"{key}: {value}" for key, value in row.items()))
    if options.csv:
        fresh = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if fresh:
                writer.writeheader()
            writer.writerow(row)


if __name__ == "__main__":
    main()
