"""`dear embed`: features or answers of folders and tables of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dear.cli.common import Device, OwnBackbone, device_named, run_folder, say, stages


def embed(
    data: Annotated[
        Path,
        typer.Option("--data", "-d", help="Folder of images, or a CSV/Parquet table with a column path."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the Parquet files.")],
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            help="Answers of this run, not features.",
            parser=run_folder,
            metavar="RUN",
            show_default=False,
        ),
    ] = None,
    backbone: OwnBackbone = None,
    shard: Annotated[int, typer.Option("--shard", min=1, help="Images per Parquet file.")] = 1024,
    engine: Annotated[str, typer.Option("--engine", help="local, or ray for a cluster.")] = "local",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes of the ray engine.")] = 2,
    device: Device = "auto",
) -> None:
    """Image features of a folder or table of any size, as Parquet; with --run, the run's answers.

    Memory stays constant, unreadable images get a sentence in the column error, and after an interruption
    the same command computes only what is missing. The result is a folder that pandas reads as one table.

    Examples: `dear embed --data photos/ --backbone mini --out features.parquet`

    `dear embed --data list.csv --run run --out answers.parquet --engine ray --workers 8`
    """
    from dear.errors import UsageError
    from dear.workflows.embed import embed as work

    if engine == "local" and workers != 2:
        raise UsageError("--workers goes with --engine ray; the local engine is one process")
    with stages() as progress:
        done = work(
            data,
            out,
            run=None if run is None else str(run),
            backbone=backbone,
            device=device_named(device),
            shard_images=shard,
            engine=engine,
            workers=workers,
            progress=progress,
        )
    say(f"{done:,} images computed; all are in {out}")
