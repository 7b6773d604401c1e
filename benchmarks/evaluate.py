"""Images per second that an adapted ViT-B/16 answers in every mode, from bytes on the device to answers.

    python benchmarks/evaluate.py --device cuda --precision bfloat16 --csv evaluate.csv

Decoding is not in it: images are bytes already. The rates of docs/scaling.md come from here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure.clock import medians

import dear
from dear._io.image_file import normalize
from dear.heads.roles import RoleMap
from dear.methods import DeAR
from dear.methods.base import in_precision
from dear.workflows.speed import add_rows, machine


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

    model = in_precision(model, options.precision)

    def answer() -> None:
        for scores in model.all_logits(normalize(pixels, clip.config.mean, clip.config.std)).values():
            scores.argmax(dim=-1)

    with torch.no_grad():
        rate = options.batch / medians({"answer": answer}, options.repeats)["answer"]
    row = {
        **machine(device),
        "shape": "ViT-B-16",
        "batch": options.batch,
        "classes": options.classes,
        "precision": options.precision,
        "images_per_s": f"{rate:.0f}",
    }
    print(", ".join(f"{key}: {value}" for key, value in row.items()))
    if options.csv:
        add_rows(options.csv, [row])


if __name__ == "__main__":
    main()
