"""The fair table: every method on ten datasets with three seeds, each dataset with its own prompt template.

    python research/accuracy/fair_table.py run --out fair --data-root DATA --small BACKBONE \
        --roles roles.json --device cuda --workers 12
    python research/accuracy/fair_table.py csv --out fair --csv research/results/fair_table.csv
    python research/accuracy/fair_table.py show research/results/fair_table.csv

`run` computes what is missing: six tasks of the attribute world on `mini`, and Caltech101, OxfordPets,
EuroSAT and ten classes of DTD on the backbone at `--small`. DATA holds the benchmarks in CoOp's layout, or
tables (`caltech101/index.csv`, ...); both get the templates of the paper's supplement, Table 4. `--workers`
processes share the device. A run that was stopped goes on with the same command. `csv` writes one row per
cell and mode, with machine, versions and date; `show` prints the tables of docs/reproducing.md from that
file alone.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import collect
from measure.script import add_options, markdown, parser_of

from dear.bench.cells import Cell, Environment
from dear.bench.engines import Local, compute
from dear.bench.plan import Request, plan
from dear.bench.session import backbone, starting_roles
from dear.bench.store import Grid, Summary
from dear.data.open import BENCHMARKS, open_data
from dear.errors import DearError, UsageError
from dear.methods import METHODS, find_method
from dear.runs.recipe import Recipe

if TYPE_CHECKING:
    import pandas as pd

WORLD = tuple(f"world:{name}" for name in ("textures", "emblems", "vehicles", "scenes", "fauna", "mixed"))
REAL = {
    "Caltech101": "caltech101",
    "OxfordPets": "oxford_pets",
    "EuroSAT": "eurosat",
    "DescribableTextures": "dtd_partial10",
}
"""Benchmarks, and the folder of each one's table where the data root does not hold CoOp's layout."""
OF_DOMAINS = ("purify",)  # trained with domains, which these datasets do not have
METRICS = ("base", "novel", "hm", "joint", "joint_hm", "ece_base", "ece_novel", "ece_joint")


@dataclass(frozen=True)
class Part:
    """The datasets of one backbone."""

    name: str  #: of the folder of its grid, and of its rows in the CSV
    backbone: str  #: what to load
    roles: str | None  #: file of its role map; None: the one that is known for it
    datasets: Mapping[str, str | None]  #: each with its template, or None for the dataset's own
    root: str | None = None  #: where benchmarks lie; None for tables and the attribute world


def every_method() -> list[str]:
    """All methods, those with presets once per preset."""
    names = []
    for name in METHODS:
        presets = getattr(find_method(name), "presets", {})
        names += [f"{name}@{preset}" for preset in presets] or [name]
    return [name for name in names if name.partition("@")[0] not in OF_DOMAINS]


def real_part(root: Path, small: str, roles: str | None) -> Part:
    """The four real datasets below `root`: as tables where all four are, else in CoOp's layout."""
    tables = {name: root / folder / "index.csv" for name, folder in REAL.items()}
    if any(table.is_file() for table in tables.values()):
        missing = [str(table) for table in tables.values() if not table.is_file()]
        if missing:
            raise UsageError(f"{missing[0]}: is missing; the other datasets are tables of that name")
        templates = {str(tables[name]): BENCHMARKS[name].template for name in REAL}
        return Part("small", small, roles, templates)
    for name in REAL:
        open_data(name, "test", root=root)
    return Part("small", small, roles, dict.fromkeys(REAL), str(root))


def plan_part(part: Part, methods: Sequence[str], seeds: Sequence[int], device: str) -> list[Cell]:
    """The cells of one backbone."""
    clip = backbone(part.backbone, device)
    request = Request(
        backbone=part.name,
        identity=clip.identity,
        roles=starting_roles(clip, part.roles),
        datasets=list(part.datasets),
        seeds=seeds,
        templates={name: template for name, template in part.datasets.items() if template is not None},
        data_root=part.root,
    )
    cells = []
    for method in methods:  # as their authors train: random crops, so many epochs however few the images
        epochs = Recipe.of(find_method(method.partition("@")[0])).epochs
        recipe = {"augment": True, "epochs": epochs}
        cells += plan("base-to-novel", replace(request, methods=[method], recipe=recipe))
    return cells


def run(args: argparse.Namespace) -> int:
    """Compute what is missing; returns the number of cells that failed."""
    root = None if args.data_root is None else str(Path(args.data_root).expanduser().resolve())
    parts = []
    if not args.only or "world" in args.only:
        parts.append(Part("mini", "mini", None, dict.fromkeys(WORLD)))
    if not args.only or "real" in args.only:
        if root is None or args.small is None:
            raise UsageError("the real datasets need --data-root and --small; `--only world` leaves them out")
        small = str(Path(args.small).resolve()) if Path(args.small).exists() else args.small
        parts.append(real_part(Path(root), small, args.roles))
    methods = args.methods.split(",") if args.methods else every_method()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    planned = [(part, plan_part(part, methods, seeds, args.device)) for part in parts]
    failed = 0
    for part, cells in planned:
        environment = Environment(part.backbone, part.root, part.roles, args.device)
        summary = Grid(Path(args.out) / part.name).run(
            cells, environment, Local(compute, args.workers), _show_progress
        )
        failed += _show_summary(part, summary)
    return failed


def _show_progress(outcome: object, done: int, total: int) -> None:
    print(f"\r{done} of {total} cells", end="", file=sys.stderr, flush=True)


def _show_summary(part: Part, summary: Summary) -> int:
    counts = f"{len(summary.computed)} computed, {len(summary.cached)} kept, {len(summary.failed)} failed"
    print(f"\r{part.name}: {counts}", file=sys.stderr)
    for cell, why in summary.failed.items():
        print(f"failed: {cell.title}: {why}", file=sys.stderr)
    return len(summary.failed)


def write_csv(out: str, path: str) -> None:
    """One row per cell and mode of all grids below `out`."""
    rows = [
        row
        for folder in sorted(Path(out).iterdir())
        if (folder / "cells").is_dir()
        for row in collect.collect([str(folder)], folder.name)
    ]
    if not rows:
        raise UsageError(f"{out}: holds no cells; compute them first")
    collect.write(rows, path)


def show(path: str) -> str:
    """Markdown, per backbone: all columns averaged over datasets, then base / novel / HM of each dataset."""
    import pandas as pd  # needed to show alone

    table = pd.read_csv(path, keep_default_na=False)
    metrics = [name for name in METRICS if name in table]
    table[metrics] = 100 * table[metrics].apply(pd.to_numeric)
    table["method"] = [_label(row) for row in table.to_dict("records")]
    blocks = []
    for name, group in table.groupby("backbone", sort=False):
        per_set = group.groupby(["method", "dataset"], sort=False)[metrics].mean()  # over seeds
        wide = per_set.reset_index()
        complete = wide.groupby("method").size() == wide["dataset"].nunique()
        mean = per_set.groupby("method", sort=False).mean()[complete]
        spread = group.groupby(["method", "seed"], sort=False)[metrics].mean().groupby("method")["hm"].std()
        mean.insert(metrics.index("hm") + 1, "± over seeds", spread)
        order = mean.sort_values("hm", ascending=False, na_position="last")
        seeds = ", ".join(str(seed) for seed in sorted(group["seed"].unique()))
        wide["all"] = [_three(row) for row in wide.to_dict("records")]
        each = wide.pivot(index="method", columns="dataset", values="all").reindex(order.index)
        blocks += [
            f"### {name}: mean of {wide['dataset'].nunique()} datasets, seeds {seeds}",
            _markdown(order.map(lambda value: "-" if math.isnan(value) else f"{value:.1f}")),
            f"### {name}: base / novel / HM of each dataset",
            _markdown(each.fillna("-")),
        ]
    return "\n\n".join(blocks) + "\n"


def _markdown(frame: pd.DataFrame) -> str:
    return markdown([frame.index.name, *frame.columns], frame.reset_index().to_numpy().tolist())


def _label(row: dict[str, object]) -> str:
    words = [row["method"], "" if row["mode"] == "default" else row["mode"], row.get("changed", "")]
    return ", ".join(str(word) for word in words if word)


def _three(row: dict[str, float]) -> str:
    return " / ".join(
        "-" if math.isnan(row[name]) else f"{row[name]:.1f}" for name in ("base", "novel", "hm")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("run", help="compute what is missing")
    making.add_argument("--out", required=True, help="folder of the grids")
    add_options(making, data_root=(str, "folder of the four real datasets"), seeds="1,2,3", device="cpu")
    add_options(making, small=(str, "backbone of the real datasets: a folder or a checkpoint file"))
    add_options(making, roles=(str, "role map of that backbone (roles.json)"))
    add_options(making, methods=(str, "comma-separated; METHOD@PRESET takes a preset; all by default"))
    add_options(making, workers=(1, "processes that share the device"))
    making.add_argument("--only", action="append", choices=("world", "real"))
    writing = commands.add_parser("csv", help="write the cells as one CSV file")
    writing.add_argument("--out", required=True, help="folder of the grids")
    writing.add_argument("--csv", required=True, help="file to write")
    showing = commands.add_parser("show", help="print the tables of a CSV file")
    showing.add_argument("csv")
    args = parser.parse_args(arguments)
    try:
        if args.command == "run":
            return 1 if run(args) else 0
        if args.command == "csv":
            write_csv(args.out, args.csv)
        else:
            print(show(args.csv))
    except DearError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
