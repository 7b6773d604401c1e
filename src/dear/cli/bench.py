"""`dear bench` and `dear ablate`: the tables of the paper."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, say, stages

if TYPE_CHECKING:
    from dear.bench.task import Results

Out = Annotated[
    Path, Option("--out", "-o", help="Folder of the grid; finished cells are not computed again.")
]
Datasets = Annotated[
    str | None, Option(help="Comma-separated: benchmark names, world:NAME, folders, tables.")
]
Seeds = Annotated[str, Option(help="Comma-separated seeds.")]
Shots = Annotated[
    str | None,
    Option(
        help="Images per class, comma-separated; 0 takes all. Default: 16; few-shot: 1,2,4,8,16; "
        "leave-one-domain-out: all."
    ),
]
Roles = Annotated[str | None, Option(help="Role map of the backbone (roles.json), or table2.")]
Set = Annotated[
    list[str] | None,
    Option("--set", help="Option of a method, METHOD.OPTION=VALUE (dear.beta=0.8); repeatable."),
]
Recipe = Annotated[
    list[str] | None,
    Option(
        help="Preset of the methods that have it (strong), or a value of the recipe (lr=1e-4); repeatable."
    ),
]
Templates = Annotated[
    list[str] | None, Option(help="Prompt template of a dataset, DATASET=TEMPLATE; repeatable.")
]
EngineName = Annotated[str, Option(help="local (this machine) or ray.")]
Address = Annotated[str | None, Option(help="A running Ray cluster: auto, ray://HOST:10001.")]
Workers = Annotated[int | None, Option(help="Processes of the local engine; 1 by default.")]
Threads = Annotated[int, Option(help="CPU threads per cell; fixed, because rounding depends on it.")]
Gpus = Annotated[float | None, Option(help="GPUs per cell on Ray; fractions are allowed.")]
Draws = Annotated[str | None, Option(help="Folder of few-shot draws to use: DATASET-16shot-seed1.jsonl.")]


def bench(
    protocol: Annotated[
        str, Argument(help="base-to-novel, few-shot, cross-dataset, domain-shift or leave-one-domain-out.")
    ],
    out: Out,
    backbone: opt.Backbone = "mini",
    methods: Annotated[
        str, Option(help="Comma-separated methods; METHOD@PRESET takes a preset.")
    ] = "zeroshot,dear",
    datasets: Datasets = None,
    seeds: Seeds = "1,2,3",
    shots: Shots = None,
    targets: Annotated[str | None, Option(help="Datasets to test on (cross-dataset, domain-shift).")] = None,
    roles: Roles = None,
    unlabeled: Annotated[
        bool,
        Option("--unlabeled", help="Learn from the training images outside the draw, without their labels."),
    ] = False,
    focus: Annotated[
        str | None, Option(help="Role to focus on, or auto, for methods that can (see `dear adapt`).")
    ] = None,
    options: Set = None,
    recipe: Recipe = None,
    template: Templates = None,
    draws: Draws = None,
    data_root: opt.DataRoot = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    threads: Threads = 1,
    gpus: Gpus = None,
    log: opt.Log = None,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Run a protocol over methods, datasets and seeds, and write its tables and a page with plots.

    One cell of the grid is one file in OUT/cells. A second run computes only what is missing; a cell that
    fails is reported and does not stop the others.

    Examples:

    `dear bench base-to-novel --datasets world:textures,world:emblems --out grid`

    `dear bench few-shot -b openai/clip-vit-base-patch16 --datasets EuroSAT --data-root ~/data --out grid`

    `dear bench base-to-novel --datasets world:textures --out grid --engine ray --address auto`
    """
    from dear.bench.task import run

    with stages() as progress:
        results = run(
            protocol,
            out,
            backbone=backbone,
            methods=methods,
            datasets=datasets,
            seeds=seeds,
            shots=shots,
            targets=targets,
            roles=roles,
            focus=focus,
            unlabeled=unlabeled,
            options=options,
            recipe=recipe,
            template=template,
            draws=draws,
            data_root=data_root,
            engine=engine,
            address=address,
            workers=workers,
            threads=threads,
            gpus=gpus,
            log=log,
            device=device,
            command=_command(),
            progress=progress,
        )
    _print(results, as_json)


def ablate(
    study: Annotated[
        str,
        Argument(
            help="masks, losses, inference, threshold, concepts, shuffle, beta, first-layer, isolation, "
            "strong, strong-roles; several with commas, or all."
        ),
    ],
    out: Out = Path("ablations"),
    backbone: opt.Backbone = "mini",
    datasets: Datasets = "world:textures,world:emblems",
    seeds: Seeds = "1,2,3",
    shots: Shots = None,
    roles: Roles = None,
    options: Set = None,
    recipe: Recipe = None,
    template: Templates = None,
    draws: Draws = None,
    data_root: opt.DataRoot = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    threads: Threads = 1,
    gpus: Gpus = None,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Run ablation studies of DeAR (base-to-novel), and write their tables and a page with plots.

    Examples:

    `dear ablate masks --out ablations`

    `dear ablate all --datasets EuroSAT -b openai/clip-vit-base-patch16 --data-root ~/data --out ablations`
    """
    from dear.bench.task import ablate as run

    with stages() as progress:
        results = run(
            study,
            out,
            backbone=backbone,
            datasets=datasets or "",
            seeds=seeds,
            shots=shots,
            roles=roles,
            options=options,
            recipe=recipe,
            template=template,
            draws=draws,
            data_root=data_root,
            engine=engine,
            address=address,
            workers=workers,
            threads=threads,
            gpus=gpus,
            device=device,
            command=_command(),
            progress=progress,
        )
    _print(results, as_json)


def _command() -> str:
    return shlex.join(["dear", *sys.argv[1:]])


def _print(results: Results, as_json: bool) -> None:
    """Print the table; exit status 1 if a cell failed."""
    if as_json:
        print_json(results.to_dict())
    else:
        echo(results.table)
        counts = f"{len(results.summary.computed)} computed, {len(results.summary.cached)} already there"
        say(f"{counts}, {len(results.failed)} failed; page: {results.files[-1]}")
    if results.failed:
        raise typer.Exit(1)
