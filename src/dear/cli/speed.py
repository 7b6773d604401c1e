"""`dear speed`: how fast this machine trains, answers and reads images, against the usual ways."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dear.cli.common import Device, Json, device_named, print_json, say

_TITLES = {
    "step": "One training step: ratio to the slowest code here",
    "inference": "Pixels on the device to answers: ratio to our plain CLIP",
    "images": "Files to training views: ratio to a PyTorch DataLoader",
}


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("speed")(speed)


def speed(
    device: Device = "auto",
    shape: Annotated[str, typer.Option("--shape", help="A model's shape: ViT-B-16, ViT-B-32 …")] = "ViT-B-16",
    batch: Annotated[int, typer.Option("--batch", help="Images a step; 16 on a GPU, 2 on a CPU.")] = 0,
    classes: Annotated[int, typer.Option("--classes", help="Classes; 100 on a GPU, 10 on a CPU.")] = 0,
    precision: Annotated[
        str, typer.Option("--precision", help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    images: Annotated[int, typer.Option("--images", help="Files the data feed reads.")] = 64,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="step, inference or images; may be repeated.")
    ] = None,
    mmrl: Annotated[
        Path | None,
        typer.Option("--mmrl", help="A copy of github.com/yunncheng/MMRL: measures its step too."),
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Add the rows to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine: a training step, inference and the data feed, with random weights and images.

    The step is compared with one that does the same without any saving and, if you have a copy, with MMRL++'s
    own code; inference of the adapted model with plain CLIP (and transformers, if installed); the feed with a
    PyTorch DataLoader. All take turns, and medians count. On a CPU it takes about two minutes.

    Examples:

    `dear speed`

    `dear speed --device cuda --classes 500 --mmrl ../MMRL --csv speed.csv`

    `dear speed --device cpu --shape ViT-B-32 --only step`
    """
    import torch

    from dear.clip.config import ClipConfig
    from dear.errors import UsageError
    from dear.speed.quick import PARTS, QuickLook, measure
    from dear.speed.table import add_rows

    if shape not in ClipConfig.names():
        raise UsageError(f"--shape {shape}: choose from {', '.join(ClipConfig.names())}")
    look = QuickLook(shape, batch, classes, precision, images, mmrl, tuple(only or PARTS))
    rows = list(measure(look, torch.device(device_named(device)), say))
    if as_json:
        print_json({"rows": rows})
    else:
        for what, title in _TITLES.items():
            _print(title, [row for row in rows if row["what"] == what])
        first = rows[0]
        typer.echo(f"{first['machine']}, {first['threads']} threads, torch {first['torch']}")
    if csv is not None:
        add_rows(csv, rows)


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    """One part as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(title=Text(title), header_style="bold")
    table.add_column("")
    for name in ("batch", "precision", "ms", "images/s", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        values = (row["batch"], row["precision"], row["ms"], row["images_per_s"], row["ratio"])
        table.add_row(Text(str(row["name"])), *(str(value) for value in values))
    Console().print(table)
