"""The losses of 50 training steps, literal and ours, from the same start on the same batches.

    python benchmarks/losses.py --device cuda --csv benchmarks/results/losses.csv

Both learn at the recipe's rate, so that a difference in any gradient would grow from step to step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from measure.literal import LiteralStep
from measure.task import SpeedTask

import dear
from dear.workflows.speed import add_rows, machine


def train_both(task: SpeedTask, steps: int, lr: float) -> list[dict[str, Any]]:
    """One row per step: both losses and their relative difference."""
    rows = []
    dtype = task.dtype
    literal = LiteralStep(task.model, task.ids, task.clip)
    learned = (literal.learned.values(), task.model.parameters())
    optimizers = [torch.optim.AdamW(tensors, lr, weight_decay=5e-4) for tensors in learned]
    for step in range(1, steps + 1):
        at = (step - 1) % task.at_once * task.batch
        pixels, labels = (t[at : at + task.batch] for t in (task.pixels, task.labels))
        with torch.autocast(task.device.type, dtype, enabled=dtype != torch.float32):
            theirs = literal.loss(pixels, labels)
        ours = task.model.loss(pixels, labels).total
        for loss, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mine, other = ours.item(), theirs.item()
        rows.append(
            {
                "precision": str(dtype).removeprefix("torch."),
                "step": step,
                "literal": f"{other:.7f}",
                "ours": f"{mine:.7f}",
                "relative_difference": f"{abs(mine - other) / abs(other):.2e}",
            }
        )
    return rows


def main() -> None:
    """Train both, print the largest difference, and add rows to a CSV file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="ViT-B-16", choices=dear.ClipConfig.names())
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    clip = dear.Clip(dear.ClipConfig.named(options.shape)).to(device)
    for precision in options.precision:
        task = SpeedTask(clip, options.batch, options.classes, precision)
        rows = train_both(task, options.steps, options.lr)
        worst = max(float(row["relative_difference"]) for row in rows)
        first, last = rows[0], rows[-1]
        print(f"{options.steps} steps in {precision}: loss {first['ours']} -> {last['ours']}")
        print(f"largest relative difference of the losses: {worst:.2e}", flush=True)
        if options.csv:
            where = {**machine(device), "shape": options.shape}
            where |= {"batch": options.batch, "classes": options.classes}
            add_rows(options.csv, [{**where, **row} for row in rows])


if __name__ == "__main__":
    main()
