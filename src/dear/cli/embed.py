"""`dear embed`: features or answers of folders and tables of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from dear.cli.options import AS_RUN, Device, OwnBackbone, Threads, device_named
from dear.cli.printing import say, stages
from dear.errors import UsageError


def embed(
    data: Annotated[
        Path, Option("--data", "-d", help="Folder of images, or a CSV/Parquet table with a column path.")
    ],
    out: Annotated[Path, Option("--out", "-o", help="Folder of the Parquet files.")],
    run: Annotated[Path | None, Option(help="Answers of this run, not features.", **AS_RUN)] = None,
    backbone: OwnBackbone = None,
    shard: Annotated[int, Option(min=1, help="Images per Parquet file.")] = 1024,
    engine: Annotated[str, Option(help="local, or ray for a cluster.")] = "local",
    workers: Annotated[int, Option(min=1, help="Processes of the ray engine.")] = 2,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Image features of a folder or table of any size, as Parquet; with --run, the run's answers.

    Memory stays constant, unreadable images get a sentence in the column error, and after an interruption
    the same command computes only what is missing. The result is a folder that pandas reads as one table.

    Examples: `dear embed --data photos/ --backbone mini --out features.parquet`

    `dear embed --data list.csv --run run --out answers.parquet --engine ray --workers 8`
    """
    from dear.tasks.embed.task import embed as work

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
