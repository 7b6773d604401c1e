"""`dear bench` and `dear ablate`: the paper's tables, one command each."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, say, stages, stoppable
from dear.errors import UsageError
from dear.utils.pairs import parse_pairs, split_names

if TYPE_CHECKING:
    from dear.bench.cells import Cell, Environment, Outcome
    from dear.bench.plan import Request
    from dear.bench.store import CellEngine, Grid, Summary

Out = Annotated[Path, Option("--out", "-o", help="Folder of the grid; what is there is not computed again.")]
Datasets = Annotated[
    str | None, Option(help="Comma-separated: benchmark names, world:NAME, folders, tables.")
]
Seeds = Annotated[str, Option(help="Comma-separated seeds.")]
Shots = Annotated[str | None, Option(help="Images per class, comma-separated; 0 takes all.")]
Roles = Annotated[str | None, Option(help="Role map of the backbone (roles.json), or table2.")]
Set = Annotated[
    list[str] | None,
    Option("--set", help="Option of a method, METHOD.OPTION=VALUE (dear.beta=0.8); may be repeated."),
]
Recipe = Annotated[
    list[str] | None,
    Option(help="A preset of the methods that have it (strong), or a value of the recipe, NAME=VALUE."),
]
Templates = Annotated[
    list[str] | None, Option(help="Prompt template of a dataset, DATASET=TEMPLATE; may be repeated.")
]
EngineName = Annotated[str, Option(help="local (this machine) or ray.")]
Address = Annotated[str | None, Option(help="A running Ray cluster: auto, ray://HOST:10001.")]
Workers = Annotated[int | None, Option(help="Processes of the local engine; 1 by default.")]
Threads = Annotated[int, Option(help="CPU threads per cell; part of the rounding, so kept fixed.")]
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
    tensorboard: opt.TensorBoard = None,
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
    from dear.bench.outputs import write_protocol
    from dear.bench.plan import find_protocol, plan
    from dear.methods import find_method
    from dear.runs.recipe import parse_recipe

    find_protocol(protocol)
    environment = _environment(backbone, roles, device, data_root, draws, threads)
    preset, values = parse_recipe(recipe)
    names = _with_preset(split_names(methods), preset)
    if focus is not None and not any(find_method(name.partition("@")[0]).can_focus for name in names):
        raise UsageError(f"--focus {focus}: none of the methods ({', '.join(names)}) can focus on heads")
    engines = _engine(environment, engine, address, workers, gpus)
    request = _request(environment, names, datasets, seeds, shots, options, values, template)
    wanted = None if targets is None else _datasets(targets)
    training = request.training.changed(focus=focus)
    request = replace(request, methods=names, targets=wanted, training=training)
    environment = replace(environment, adapters=str((out / "adapters").resolve()))
    cells = plan(protocol, request)
    grid, summary = _compute(out, cells, environment, engines, protocol, tensorboard)
    files = write_protocol(grid, protocol, cells, _command(), _failures(summary))
    _print_summary(summary, files, as_json)


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
    from dear.bench.ablations import STUDIES
    from dear.bench.ablations import study as find
    from dear.bench.outputs import write_studies
    from dear.bench.plan import plan_study
    from dear.bench.session import backbone as open_backbone

    names = list(STUDIES) if study == "all" else split_names(study)
    methods = [find(name).method for name in names]
    environment = _environment(backbone, roles, device, data_root, draws, threads)
    engines = _engine(environment, engine, address, workers, gpus)
    values = parse_pairs(recipe, "--recipe")
    request = _request(environment, methods, datasets, seeds, shots, options, values, template)
    layers = open_backbone(environment.backbone, environment.device).config.vision.layers
    studies = [(found, plan_study(found, request)) for found in (find(name, layers) for name in names)]
    cells = [cell for _, planned in studies for _, own in planned for cell in own]
    grid, summary = _compute(out, cells, environment, engines, study)
    files = write_studies(grid, studies, _command(), _failures(summary))
    _print_summary(summary, files, as_json)


def _with_preset(methods: Sequence[str], preset: str | None) -> list[str]:
    """The methods, each that has the preset with it: METHOD@PRESET."""
    from dear.methods import find_method

    if preset is None:
        return list(methods)
    has = {name: "@" not in name and preset in find_method(name).presets for name in methods}
    if not any(has.values()):
        raise UsageError(
            f"--recipe {preset}: none of the methods ({', '.join(methods)}) has a preset of that name"
        )
    return [f"{name}@{preset}" if has[name] else name for name in methods]


def _environment(
    backbone: str, roles: str | None, device: str, data_root: str | None, draws: str | None, threads: int
) -> Environment:
    """Where cells are computed; paths are made absolute, since workers start elsewhere."""
    from dear.bench.cells import Environment

    return Environment(
        backbone=_path(backbone) if Path(backbone).exists() else backbone,
        data_root=None if data_root is None else _path(data_root),
        roles_file=roles if roles in (None, "table2") else _path(roles),
        device=opt.device_named(device),
        threads=threads,
        draws=None if draws is None else _path(draws),
    )


def _request(
    environment: Environment,
    methods: Sequence[str],
    datasets: str | None,
    seeds: str,
    shots: str | None,
    options: Sequence[str] | None,
    recipe: Mapping[str, Any],
    templates: Sequence[str] | None,
) -> Request:
    """What is asked for; wrong use is refused before the backbone is loaded."""
    from dear.bench.plan import Request
    from dear.bench.session import backbone as open_backbone
    from dear.bench.session import starting_roles
    from dear.methods import find_method

    roles, data_root = environment.roles_file, environment.data_root
    if roles is not None and not any(find_method(name.partition("@")[0]).uses_roles for name in methods):
        raise UsageError(f"--roles {roles}: none of the methods ({', '.join(methods)}) uses roles")
    by_method: dict[str, dict[str, Any]] = {}
    for name, value in parse_pairs(options, "--set").items():
        method, dot, option = name.partition(".")
        if not dot:
            raise UsageError(f"--set {name}={value}: write METHOD.OPTION=VALUE, as in dear.beta=0.8")
        by_method.setdefault(method.lower(), {})[option] = value
    typed = [pair.partition("=") for pair in templates or ()]
    if not all(name and value for name, _, value in typed):
        raise UsageError("--template: write DATASET=TEMPLATE")
    known_seeds, known_shots = _numbers(seeds, "--seeds"), _numbers(shots, "--shots") if shots else None
    clip = open_backbone(environment.backbone, environment.device)
    return Request(
        backbone=clip.name,
        identity=clip.identity,
        roles=starting_roles(clip, roles),
        datasets=_datasets(datasets),
        seeds=known_seeds,
        shots=known_shots,
        options=by_method,
        recipe=recipe,
        templates={_datasets(name)[0]: value for name, _, value in typed},
        data_root=data_root,
        draws=environment.draws,
    )


def _datasets(text: str | None) -> list[str]:
    """Comma-separated datasets; paths are made absolute, since workers start elsewhere."""
    from dear.data.open import find_benchmark

    return [
        str(Path(name).resolve()) if find_benchmark(name) is None and Path(name).exists() else name
        for name in split_names(text or "")
    ]


def _path(name: str) -> str:
    return str(Path(name).expanduser().resolve())


def _numbers(text: str, option: str) -> list[int]:
    """Comma-separated whole numbers."""
    try:
        numbers = [int(part) for part in split_names(text)]
    except ValueError:
        raise UsageError(f"{option} {text}: whole numbers with commas between them are expected") from None
    if not numbers or min(numbers) < 0:
        raise UsageError(f"{option} {text}: at least one number is needed, and none below 0")
    return numbers


def _engine(
    environment: Environment, name: str, address: str | None, workers: int | None, gpus: float | None
) -> CellEngine:
    from dear.bench.engines import compute, make_engine

    if environment.threads < 1:
        raise UsageError(f"--threads {environment.threads}: at least one is needed")
    if name == "ray" and gpus is None and environment.device.startswith("cuda"):
        gpus = 1.0
    return make_engine(name, compute, workers, address, cpus=environment.threads, gpus=gpus)


def _compute(
    out: Path,
    cells: list[Cell],
    environment: Environment,
    engine: CellEngine,
    title: str,
    tensorboard: str | None = None,
) -> tuple[Grid, Summary]:
    """Run the grid with a progress bar; failures and notices are printed as they come."""
    from dear.bench.store import Grid
    from dear.data.open import check_data
    from dear.train.tensorboard import Board

    named = [name for cell in cells for name in (cell.dataset, *cell.setting.get("targets", ()))]
    for name in dict.fromkeys(named):  # what is missing is said now, and once
        check_data(name, environment.data_root)
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

        summary = grid.run(cells, environment, engine, watch)
    if board is not None:
        board.close()
    for notice in summary.notices:
        say(f"notice: {notice}")
    return grid, summary


def _failures(summary: Summary) -> dict[str, str]:
    return {cell.title: why for cell, why in summary.failed.items()}


def _command() -> str:
    return shlex.join(["dear", *sys.argv[1:]])


def _print_summary(summary: Summary, files: Sequence[Path], as_json: bool) -> None:
    """Say what was done; exit status 1 if a cell failed."""
    if as_json:
        print_json(
            {
                "cached": len(summary.cached),
                "computed": len(summary.computed),
                "failed": _failures(summary),
                "files": [str(path) for path in files],
            }
        )
    else:
        echo(files[0].read_text(encoding="utf-8"))
        counts = f"{len(summary.computed)} computed, {len(summary.cached)} already there"
        say(f"{counts}, {len(summary.failed)} failed; page: {files[-1]}")
    if summary.failed:
        raise typer.Exit(1)
