"""The losses of 50 training steps, literal and ours, from the same start on the same batches.

    python benchmarks/losses.py --device cuda --precision float32 --csv benchmarks/results/losses.csv
    python benchmarks/losses.py --device cuda --precision bfloat16 --csv benchmarks/results/losses.csv

Both learn at the recipe's rate, so that a difference in any gradient would grow from step to step.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import dear
from dear.speed.literal import LiteralStep
from dear.speed.table import add_rows, machine
from dear.speed.task import SpeedTask


def main() -> None:
    """Train both, print the largest difference, and add rows to a CSV file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="ViT-B-16", choices=dear.ClipConfig.names())
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    clip = dear.Clip(dear.ClipConfig.named(options.shape)).to(device)
    task = SpeedTask(clip, options.batch, options.classes, options.precision)
    rows = []
    with task.in_precision() as dtype:
        literal = LiteralStep(task.model, task.ids, clip)
        both = {
            "literal": torch.optim.AdamW(literal.learned.values(), options.lr, weight_decay=5e-4),
            "ours": torch.optim.AdamW(task.model.parameters(), options.lr, weight_decay=5e-4),
        }
        for step in range(1, options.steps + 1):
            at = (step - 1) % task.ahead * options.batch
            pixels, labels = (t[at : at + options.batch] for t in (task.pixels, task.labels))
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                theirs = literal.loss(pixels, labels)
            ours = task.model.loss(pixels, labels).total
            for loss, optimiser in zip((theirs, ours), both.values(), strict=True):
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            mine, other = ours.item(), theirs.item()
            gap = abs(mine - other) / abs(other)
            rows.append(
                {
                    "precision": str(dtype).removeprefix("torch."),
                    "step": step,
                    "literal": f"{other:.7f}",
                    "ours": f"{mine:.7f}",
                    "relative_difference": f"{gap:.2e}",
                }
            )
    worst = max(float(row["relative_difference"]) for row in rows)
    first, last = rows[0], rows[-1]
    print(f"{options.steps} steps in {first['precision']}: loss {first['ours']} -> {last['ours']}")
    print(f"largest relative difference of the losses: {worst:.2e}")
    if options.csv:
        where = {
            **machine(device),
            "shape": options.shape,
            "batch": options.batch,
            "classes": options.classes,
        }
        add_rows(options.csv, [{**where, **row} for row in rows])


if __name__ == "__main__":
    main()
