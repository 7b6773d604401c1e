"""`dear bench` and `dear ablate`: the paper's tables, one command each."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dear.cli.common import (
    Backbone,
    DataRoot,
    Device,
    Json,
    TensorBoard,
    device_named,
    print_json,
    say,
    stages,
    stoppable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dear.bench.cells import Cell, Outcome, Place
    from dear.bench.grid import Engine, Grid, Summary
    from dear.bench.plan import Request

Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder of the grid; what is there is not computed again.")
]
Datasets = Annotated[
    str | None,
    typer.Option("--datasets", help="Comma-separated: benchmark names, world:NAME, folders, tables."),
]
Seeds = Annotated[str, typer.Option("--seeds", help="Comma-separated seeds.")]
Shots = Annotated[str | None, typer.Option("--shots", help="Images a class, comma-separated; 0 takes all.")]
Roles = Annotated[str | None, typer.Option("--roles", help="Role map of the backbone (roles.json).")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Option of a method, METHOD.OPTION=VALUE (dear.beta=0.8); may be repeated."),
]
Recipe = Annotated[
    list[str] | None,
    typer.Option("--recipe", help="Number of the recipe, NAME=VALUE (epochs=5); may be repeated."),
]
EngineName = Annotated[str, typer.Option("--engine", help="local (this machine) or ray.")]
Address = Annotated[
    str | None, typer.Option("--address", help="A running Ray cluster: auto, ray://HOST:10001.")
]
Workers = Annotated[int, typer.Option("--workers", help="Processes of the local engine.")]
Threads = Annotated[
    int, typer.Option("--threads", help="CPU threads a cell; part of the rounding, so kept fixed.")
]
Gpus = Annotated[float | None, typer.Option("--gpus", help="GPUs a cell takes on Ray; parts are allowed.")]
Draws = Annotated[
    str | None, typer.Option("--draws", help="Folder of few-shot draws to use: DATASET-16shot-seed1.jsonl.")
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("bench")(bench)
    app.command("ablate")(ablate)


def bench(
    protocol: Annotated[
        str,
        typer.Argument(help="base-to-novel, few-shot, cross-dataset, domain-shift or leave-one-domain-out."),
    ],
    out: Out,
    backbone: Backbone = "mini",
    methods: Annotated[
        str, typer.Option("--methods", help="Comma-separated names of methods.")
    ] = "zeroshot,dear",
    datasets: Datasets = None,
    seeds: Seeds = "1,2,3",
    shots: Shots = None,
    targets: Annotated[
        str | None, typer.Option("--targets", help="Datasets to test on (cross-dataset, domain-shift).")
    ] = None,
    roles: Roles = None,
    options: Set = None,
    recipe: Recipe = None,
    draws: Draws = None,
    data_root: DataRoot = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = 1,
    threads: Threads = 1,
    gpus: Gpus = None,
    tensorboard: TensorBoard = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Run a protocol over methods, datasets and seeds, and write its tables and a page with plots.

    One cell of the grid is one file in OUT/cells. A second run computes only what is missing; a cell that
    fails is reported and does not stop the others.

    Examples:
    `dear bench base-to-novel --datasets world:textures,world:emblems --out grid`

    `dear bench few-shot -b openai/clip-vit-base-patch16 --datasets EuroSAT --data-root ~/data --out grid`

    `dear bench base-to-novel --datasets world:textures --out grid --engine ray --address auto`
    """
    from dataclasses import replace

    from dear.bench.outputs import write_protocol
    from dear.bench.plan import plan

    request, place = _prepare(
        backbone, roles, device, data_root, draws, threads, datasets, seeds, shots, options, recipe
    )
    wanted = None if targets is None else _datasets(targets)
    request = replace(request, methods=_names(methods), targets=wanted)
    place = replace(place, adapters=str((out / "adapters").resolve()))
    cells = plan(protocol, request)
    grid, summary = _compute(
        out, cells, place, _engine(engine, address, workers, threads, gpus, place), protocol, tensorboard
    )
    files = write_protocol(grid, protocol, cells, _command(), _failures(summary))
    _tell(summary, files, as_json)


def ablate(
    study: Annotated[
        str,
        typer.Argument(
            help="masks, losses, inference, threshold, concepts, shuffle, beta, first-layer, isolation; "
            "several with commas, or all."
        ),
    ],
    out: Out = Path("ablations"),
    backbone: Backbone = "mini",
    datasets: Datasets = "world:textures,world:emblems",
    seeds: Seeds = "1,2,3",
    shots: Shots = None,
    roles: Roles = None,
    options: Set = None,
    recipe: Recipe = None,
    draws: Draws = None,
    data_root: DataRoot = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = 1,
    threads: Threads = 1,
    gpus: Gpus = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Run ablation studies of DeAR (base-to-novel), and write their tables and a page with plots.

    Examples:
    `dear ablate masks --out ablations`

    `dear ablate all --datasets EuroSAT -b openai/clip-vit-base-patch16 --data-root ~/data --out ablations`
    """
    from dear.bench.ablations import STUDIES
    from dear.bench.ablations import study as find
    from dear.bench.outputs import write_studies
    from dear.bench.plan import plan_study
    from dear.bench.session import backbone as open_backbone

    request, place = _prepare(
        backbone, roles, device, data_root, draws, threads, datasets, seeds, shots, options, recipe
    )
    layers = open_backbone(place.backbone, place.device).config.vision.layers
    names = list(STUDIES) if study == "all" else _names(study)
    studies = [(found, plan_study(found, request)) for found in (find(name, layers) for name in names)]
    cells = [cell for _, planned in studies for _, own in planned for cell in own]
    grid, summary = _compute(
        out, cells, place, _engine(engine, address, workers, threads, gpus, place), study
    )
    files = write_studies(grid, studies, _command(), _failures(summary))
    _tell(summary, files, as_json)


def _prepare(
    backbone: str,
    roles: str | None,
    device: str,
    data_root: str | None,
    draws: str | None,
    threads: int,
    datasets: str | None,
    seeds: str,
    shots: str | None,
    options: Sequence[str] | None,
    recipe: Sequence[str] | None,
) -> tuple[Request, Place]:
    """What is asked for, and where it is computed."""
    from dear.bench.cells import Place
    from dear.bench.plan import Request
    from dear.bench.session import backbone as open_backbone
    from dear.bench.session import starting_roles
    from dear.errors import UsageError

    if threads < 1:
        raise UsageError(f"--threads {threads}: at least one is needed")
    place = Place(
        backbone=backbone if not Path(backbone).exists() else str(Path(backbone).resolve()),
        data_root=None if data_root is None else str(Path(data_root).expanduser().resolve()),
        roles_file=None if roles is None else str(Path(roles).resolve()),
        device=device_named(device),
        threads=threads,
        draws=None if draws is None else str(Path(draws).resolve()),
    )
    clip = open_backbone(place.backbone, place.device)
    by_method: dict[str, dict[str, Any]] = {}
    for text in options or ():
        name, value = _pair(text, "--set")
        method, dot, option = name.partition(".")
        if not dot:
            raise UsageError(f"--set {text}: write METHOD.OPTION=VALUE, as in dear.beta=0.8")
        by_method.setdefault(method, {})[option] = value
    request = Request(
        backbone=clip.name,
        fingerprint=clip.fingerprint,
        roles=starting_roles(clip, place.roles_file),
        datasets=_datasets(datasets),
        seeds=_numbers(seeds, "--seeds"),
        shots=None if shots is None else _numbers(shots, "--shots"),
        options=by_method,
        recipe=dict(_pair(text, "--recipe") for text in recipe or ()),
        data_root=place.data_root,
        draws=place.draws,
    )
    return request, place


def _datasets(text: str | None) -> list[str]:
    """Comma-separated datasets; paths are made absolute, since workers start elsewhere."""
    from dear.data.benchmarks import find_benchmark

    return [
        str(Path(name).resolve()) if find_benchmark(name) is None and Path(name).exists() else name
        for name in _names(text or "")
    ]


def _names(text: str) -> list[str]:
    """Comma-separated names."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _numbers(text: str, option: str) -> list[int]:
    """Comma-separated whole numbers."""
    from dear.errors import UsageError

    try:
        numbers = [int(part) for part in _names(text)]
    except ValueError:
        raise UsageError(f"{option} {text}: whole numbers with commas between them are expected") from None
    if not numbers or min(numbers) < 0:
        raise UsageError(f"{option} {text}: at least one number is needed, and none below 0")
    return numbers


def _pair(text: str, option: str) -> tuple[str, Any]:
    """NAME=VALUE, the value read as JSON where it is JSON and as text where it is not."""
    from dear.errors import UsageError

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{option} {text}: write NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _engine(
    name: str, address: str | None, workers: int, threads: int, gpus: float | None, place: Place
) -> Engine:
    from dear.bench.engines import make_engine
    from dear.bench.work import compute

    wanted = (1.0 if place.device.startswith("cuda") else 0.0) if gpus is None else gpus
    return make_engine(name, compute, workers, address, cpus=threads, gpus=wanted)


def _compute(
    out: Path, cells: list[Cell], place: Place, engine: Engine, title: str, tensorboard: str | None = None
) -> tuple[Grid, Summary]:
    """Run the grid with a progress bar; failures and notices are told as they come."""
    from dear.bench.grid import Grid
    from dear.data.open import check_data
    from dear.train.tensorboard import Board

    for cell in cells:  # what is not there is told now, and once
        for name in (cell.dataset, *cell.setting.get("targets", ())):
            check_data(name, place.data_root)
    grid = Grid(out)
    board = None if tensorboard is None else Board(tensorboard)
    there = 0

    def more() -> str:
        return f"; {there} of {len(set(cells))} cells are done, the same command computes the rest"

    with stages() as bar, stoppable(more):

        def watch(outcome: Outcome | None, done: int, total: int) -> None:
            nonlocal there
            there = done
            bar(title, done, total)
            if outcome is not None and outcome.error is not None:
                say(f"failed: {outcome.cell.title}: {outcome.error['message']}")
            if board is not None and outcome is not None and outcome.result is not None:
                cell = outcome.cell
                board.result(cell.method, cell.dataset, cell.seed, outcome.result["modes"])

        summary = grid.run(cells, place, engine, watch)
    if board is not None:
        board.close()
    for notice in summary.notices:
        say(f"notice: {notice}")
    return grid, summary


def _failures(summary: Summary) -> dict[str, str]:
    return {cell.title: why for cell, why in summary.failed.items()}


def _command() -> str:
    return shlex.join(["dear", *sys.argv[1:]])


def _tell(summary: Summary, files: Sequence[Path], as_json: bool) -> None:
    """Say what was done; exit status 1 if a cell failed."""
    if as_json:
        print_json(
            {
                "kept": len(summary.kept),
                "computed": len(summary.computed),
                "failed": _failures(summary),
                "files": [str(path) for path in files],
            }
        )
    else:
        typer.echo(files[0].read_text(encoding="utf-8"))
        counts = f"{len(summary.computed)} computed, {len(summary.kept)} already there"
        say(f"{counts}, {len(summary.failed)} failed; page: {files[-1]}")
    if summary.failed:
        raise typer.Exit(1)
