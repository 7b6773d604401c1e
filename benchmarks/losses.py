"""The losses of 50 training steps, literal and ours, from the same start on the same batches.

    python benchmarks/losses.py --device cuda --csv benchmarks/results/losses.csv

Both learn at the recipe's rate, so that a difference in any gradient would grow from step to step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from measure.literal import LiteralStep
from measure.script import DEVICE, arguments, record
from measure.task import SpeedTask

import dear


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
    options = arguments(
        __doc__,
        device=DEVICE,
        shape="ViT-B-16",
        precision=["float32", "bfloat16"],
        steps=50,
        batch=16,
        classes=50,
        lr=1e-3,
        csv=Path,
    )
    torch.manual_seed(0)
    clip = dear.Clip(dear.ClipConfig.named(options.shape)).to(options.device)
    for precision in options.precision:
        task = SpeedTask(clip, options.batch, options.classes, precision)
        rows = train_both(task, options.steps, options.lr)
        where = {"shape": options.shape, "batch": options.batch, "classes": options.classes}
        record(options.csv, [{**where, **row} for row in rows], options.device)
        worst = max(float(row["relative_difference"]) for row in rows)
        print(f"largest relative difference of the losses in {precision}: {worst:.2e}", flush=True)


if __name__ == "__main__":
    main()
