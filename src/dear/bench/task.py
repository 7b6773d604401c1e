"""The paper's protocols and ablations as two functions: `dear.bench.run` and `dear.bench.ablate`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dear.bench.ablations import STUDIES, Study
from dear.bench.ablations import study as find_study
from dear.bench.arguments import (
    Names,
    Numbers,
    read_datasets,
    read_environment,
    read_names,
    read_request,
    with_preset,
)
from dear.bench.cells import Cell, Environment, Outcome
from dear.bench.engines import compute, make_engine
from dear.bench.outputs import write_protocol, write_studies
from dear.bench.plan import find_protocol, plan, plan_study
from dear.bench.session import backbone as open_backbone
from dear.bench.store import CellEngine, Grid, Summary
from dear.data.open import check_data
from dear.errors import Interrupted, UsageError
from dear.methods import find_method
from dear.runs.recipe import parse_recipe
from dear.train.trackers import Tracker
from dear.utils.files import PathLike, check_output
from dear.utils.progress import Progress, silent

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger("dear")


@dataclass(frozen=True)
class Results:
    """A computed grid; a notebook shows its table."""

    grid: Grid
    summary: Summary
    files: tuple[Path, ...]  #: tables as Markdown, CSV and LaTeX, the page last

    @property
    def failed(self) -> dict[str, str]:
        """Message of each failed cell."""
        return {cell.title: message for cell, message in self.summary.failed.items()}

    @property
    def table(self) -> str:
        """The table as Markdown."""
        return self.files[0].read_text(encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "cached": len(self.summary.cached),
            "computed": len(self.summary.computed),
            "failed": self.failed,
            "files": [str(path) for path in self.files],
        }

    def to_frame(self) -> pd.DataFrame:
        """The table as a pandas table."""
        import pandas as pd

        return pd.read_csv(next(path for path in self.files if path.suffix == ".csv"))

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html())


def run(
    protocol: str,
    out: PathLike,
    *,
    backbone: str = "mini",
    methods: Names = "zeroshot,dear",
    datasets: Names | None = None,
    seeds: Numbers = "1,2,3",
    shots: Numbers | None = None,
    targets: Names | None = None,
    roles: str | None = None,
    focus: str | None = None,
    unlabeled: bool = False,
    options: Mapping[str, Any] | Sequence[str] | None = None,
    recipe: str | Mapping[str, Any] | Sequence[str] | None = None,
    template: Mapping[str, str] | Sequence[str] | None = None,
    draws: PathLike | None = None,
    data_root: PathLike | None = None,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    threads: int = 1,
    gpus: float | None = None,
    log: str | None = None,
    device: str = "auto",
    command: str = "",
    progress: Progress = silent,
) -> Results:
    """Run a protocol over methods, datasets and seeds, and write its tables and a page with plots.

    One cell of the grid is one file in `out/cells`. A second run computes only what is missing; a cell that
    fails is reported and does not stop the others.

    Args:
        protocol: "base-to-novel", "few-shot", "cross-dataset", "domain-shift" or "leave-one-domain-out".
        out: folder of the grid.
        backbone: what `load` takes.
        methods: names; "METHOD@PRESET" uses a preset. All lists may be texts with commas.
        datasets: to train on: benchmark names, `world:NAME`, folders, tables.
        seeds: one cell each.
        shots: images per class, 0 for all; None: those of the protocol.
        targets: datasets to test on (cross-dataset, domain-shift).
        roles: role map of the backbone, or "table2".
        focus: role to focus on, or "auto", for methods that can.
        unlabeled: learn from the training images that the draw leaves out, without their labels, as well.
        options: of methods, as {"dear.beta": 0.8}.
        recipe: a preset of the methods that have it, values of the recipe by name, or a list of both.
        template: prompt per dataset.
        draws: folder of few-shot draws to use: DATASET-16shot-seed1.jsonl.
        data_root: folder of the benchmarks.
        engine: "local" or "ray".
        address: a running Ray cluster.
        workers: processes of the local engine; None: 1.
        threads: CPU threads per cell; it decides how sums are rounded, so it is fixed.
        gpus: GPUs per cell on Ray.
        log: also log results to tensorboard:FOLDER, mlflow:FOLDER, wandb:PROJECT, or trackio:PROJECT.
        device: "auto", "cpu", "cuda", …
        command: shown on the page as the way to repeat the results.
        progress: called with (protocol, cells done, cells in all).

    Raises:
        DearError: anything a user can correct.

    Example:
        >>> run("base-to-novel", "grid", datasets=["world:textures"]).to_frame()    # doctest: +SKIP
    """
    find_protocol(protocol)
    check_output(out, folder=True)
    tracker = None if log is None else Tracker(log)
    environment = read_environment(backbone, roles, device, data_root, draws, threads)
    preset, values = parse_recipe(recipe)
    names = with_preset(read_names(methods), preset)
    if focus is not None and not any(find_method(name.partition("@")[0]).can_focus for name in names):
        raise UsageError(f"focus {focus}: none of the methods ({', '.join(names)}) can focus on heads")
    cell_engine = _engine(environment, engine, address, workers, gpus)
    request = read_request(environment, names, datasets, seeds, shots, options, values, template)
    request = replace(
        request,
        methods=names,
        targets=None if targets is None else read_datasets(targets),
        training=request.training.changed(focus=focus, unlabeled="rest" if unlabeled else None),
    )
    environment = replace(environment, adapters=str((Path(out) / "adapters").resolve()))
    cells = plan(protocol, request)
    grid, summary = _compute(Path(out), cells, environment, cell_engine, protocol, tracker, progress)
    failed = {cell.title: message for cell, message in summary.failed.items()}
    return Results(grid, summary, tuple(write_protocol(grid, protocol, cells, command, failed)))


def ablate(
    study: Names,
    out: PathLike = "ablations",
    *,
    backbone: str = "mini",
    datasets: Names = "world:textures,world:emblems",
    seeds: Numbers = "1,2,3",
    shots: Numbers | None = None,
    roles: str | None = None,
    options: Mapping[str, Any] | Sequence[str] | None = None,
    recipe: str | Mapping[str, Any] | Sequence[str] | None = None,
    template: Mapping[str, str] | Sequence[str] | None = None,
    draws: PathLike | None = None,
    data_root: PathLike | None = None,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    threads: int = 1,
    gpus: float | None = None,
    device: str = "auto",
    command: str = "",
    progress: Progress = silent,
) -> Results:
    """Run ablation studies of DeAR (base-to-novel), and write their tables and a page with plots.

    Args:
        study: names of studies, or "all".
        out: folder of the grid.
        recipe: a preset for all variants instead of their own, values by name, or a list of both.
        backbone: see `run`, also for all other parameters.
        datasets: see `run`.
        seeds: see `run`.
        shots: see `run`.
        roles: see `run`.
        options: see `run`.
        template: see `run`.
        draws: see `run`.
        data_root: see `run`.
        engine: see `run`.
        address: see `run`.
        workers: see `run`.
        threads: see `run`.
        gpus: see `run`.
        device: see `run`.
        command: see `run`.
        progress: see `run`.

    Raises:
        DearError: anything a user can correct.

    Example:
        >>> ablate("masks", datasets=["world:textures"]).to_frame()    # doctest: +SKIP
    """
    check_output(out, folder=True)
    names = list(STUDIES) if study == "all" else read_names(study)
    methods = [find_study(name).method for name in names]
    preset, values = parse_recipe(recipe)
    for method in methods:
        find_method(method).preset(preset)
    environment = read_environment(backbone, roles, device, data_root, draws, threads)
    cell_engine = _engine(environment, engine, address, workers, gpus)
    request = read_request(environment, methods, datasets, seeds, shots, options, values, template)
    layers = open_backbone(environment.backbone, environment.device).config.vision.layers
    studies = [_change_preset(find_study(name, layers), preset) for name in names]
    planned = [(one, plan_study(one, request)) for one in studies]
    cells = [cell for _, variants in planned for _, part in variants for cell in part]
    grid, summary = _compute(Path(out), cells, environment, cell_engine, ",".join(names), None, progress)
    failed = {cell.title: message for cell, message in summary.failed.items()}
    return Results(grid, summary, tuple(write_studies(grid, planned, command, failed)))


def _change_preset(study: Study, preset: str | None) -> Study:
    """A study whose variants start from another preset."""
    if preset is None:
        return study
    return replace(study, variants=tuple(replace(variant, preset=preset) for variant in study.variants))


def _engine(
    environment: Environment, name: str, address: str | None, workers: int | None, gpus: float | None
) -> CellEngine:
    if name == "ray" and gpus is None and environment.device.startswith("cuda"):
        gpus = 1.0
    return make_engine(name, compute, workers, address, cpus=environment.threads, gpus=gpus)


def _compute(
    out: Path,
    cells: list[Cell],
    environment: Environment,
    engine: CellEngine,
    title: str,
    tracker: Tracker | None,
    progress: Progress,
) -> tuple[Grid, Summary]:
    """Compute the grid; failures and notices are logged as they come."""
    names = [name for cell in cells for name in (cell.dataset, *cell.setting.get("targets", ()))]
    for name in dict.fromkeys(names):  # missing data is reported now, and once
        check_data(name, environment.data_root)
    grid = Grid(out)
    finished = 0

    def watch(outcome: Outcome | None, done: int, total: int) -> None:
        nonlocal finished
        finished = done
        progress(title, done, total)
        if outcome is not None and outcome.error is not None:
            _log.warning("failed: %s: %s", outcome.cell.title, outcome.error["message"])
        if tracker is not None and outcome is not None and outcome.result is not None:
            cell = outcome.cell
            tracker.result(cell.method, cell.dataset, cell.seed, outcome.result["modes"])

    try:
        summary = grid.run(cells, environment, engine, watch)
    except KeyboardInterrupt:
        count = len(set(cells))
        raise Interrupted(
            f"interrupted; {finished} of {count} cells are done, the same command computes the rest"
        ) from None
    if tracker is not None:
        tracker.close()
    for notice in summary.notices:
        _log.warning("notice: %s", notice)
    return grid, summary
