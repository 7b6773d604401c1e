"""`dear speed`: how fast this machine is, and how long an adaptation will take on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, print_table, say
from dear.utils.text import format_duration

_TITLES = {
    "read": "reading and decoding files",
    "train": "a training step",
    "answer": "answering, pixels already on the device",
}


def speed(
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    shape: Annotated[str, Option(help="A model's shape: ViT-B-16, ViT-B-32 …")] = "ViT-B-16",
    method: Annotated[str, Option("--method", "-m", help="The method that is trained.")] = "dear",
    classes: Annotated[int, Option(help="Number of classes.")] = 10,
    shots: Annotated[int, Option(help="Images per class.")] = 16,
    batch: Annotated[int | None, Option(help="Images per step (default: set by the method).")] = None,
    precision: Annotated[str, Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    images: Annotated[int, Option(help="Files that are read.")] = 64,
    csv: Annotated[Path | None, Option(help="Add the rows to this file.")] = None,
    as_json: opt.Json = False,
) -> None:
    """Measure this machine with random weights and images, and estimate the time of `dear adapt`.

    Comparisons with other code are scripts in benchmarks/.

    Examples:

    `dear speed`

    `dear speed --device cuda --classes 500 --csv speed.csv`

    `dear speed --device cpu --shape ViT-B-32 --method coop`
    """
    from dear.tasks.speed import measure_speed

    rows, adapt = measure_speed(
        device=device, shape=shape, method=method, classes=classes, shots=shots, batch=batch,
        precision=precision, images=images, csv=csv,
        progress=lambda stage, done, total: say(f"measuring: {stage}"),
    )  # fmt: skip
    if as_json:
        print_json({"rows": rows, "adapt": adapt})
        return
    figures = [
        [_TITLES[row["what"]], *(str(row[name]) for name in ("images", "ms", "images_per_s"))] for row in rows
    ]
    print_table(("", "images", "ms", "images/s"), figures)
    first = rows[0]
    echo(f"{first['machine']}, {first['threads']} threads, torch {first['torch']}, {first['precision']}")
    task = f"dear adapt --method {method} on {classes} classes with {shots} images each"
    echo(f"{task}: {adapt['steps']} steps, about {format_duration(adapt['seconds'])}")
