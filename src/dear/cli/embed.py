"""`dear embed`: features and answers of folders and tables of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import say, stages
from dear.errors import UsageError


def embed(
    data: Annotated[
        str,
        Option("--data", "-d", help="Folder, table, or WebDataset tar of images; or any labeled data."),
    ],
    out: Annotated[Path, Option("--out", "-o", help="Folder of the Parquet files.")],
    run: Annotated[
        Path | None, Option("--run", help="Run whose answers to compute as well.", **opt.RUN_OPTIONS)
    ] = None,
    backbone: Annotated[
        str | None,
        Option("--backbone", "-b", help="Backbone (default: mini, or that of the run)."),
    ] = None,
    thumbnails: Annotated[
        bool, Option("--thumbnails", help="Add a column image: a JPEG of at most 128 pixels a side.")
    ] = False,
    data_root: opt.DataRoot = None,
    shard: Annotated[int, Option(min=1, help="Images per Parquet file.")] = 1024,
    engine: Annotated[str, Option(help="local, or ray for a cluster.")] = "local",
    workers: Annotated[int, Option(min=1, help="Processes of the ray engine.")] = 2,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Write image features of a folder or table of any size as Parquet; with --run, also the run's answers.

    Columns: path, label and split where they are known, embedding, error; with --run answer, probability, and
    margin (to the second class). Memory stays constant. After an interruption the same command computes only
    what is missing. The result is a folder that pandas reads as one table.

    Examples:

    `dear embed --data photos/ --backbone mini --out features.parquet`

    `dear embed --data shard-0001.tar --run run --thumbnails --out shown.parquet`

    `dear embed --data list.csv --run run --out answers.parquet --engine ray --workers 8`
    """
    from dear.tasks.embed.task import embed as compute

    if engine == "local" and workers != 2:
        raise UsageError("--workers needs --engine ray, got --engine local, which is one process")
    with stages() as progress:
        result = compute(
            data,
            out,
            run=run,
            backbone=backbone,
            thumbnails=thumbnails,
            data_root=data_root,
            shard=shard,
            engine=engine,
            workers=workers,
            device=device,
            progress=progress,
        )
    say(f"{out}: {result.computed:,} images computed")
