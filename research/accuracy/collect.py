"""The cells of finished grids as one CSV, one row per cell and mode, and as compact Markdown.

    dear bench base-to-novel --datasets world:textures,world:emblems --out grid
    python research/accuracy/collect.py grid --csv research/results/mini_ablations.csv
    python research/accuracy/collect.py --show research/results/mini_ablations.csv

The first form reads `grid/cells/*.json`; the second prints the tables of docs/reproducing.md from the CSV.
Rows are methods with what was changed in them, columns are datasets, a field is the mean over seeds in
percent.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from measure.script import markdown, parser_of, read

from dear.bench.cells import Cell
from dear.bench.plan import find_protocol
from dear.bench.store import Grid
from dear.bench.tables import preset_of, short_names
from dear.methods import find_method
from dear.runs.recipe import Recipe

FIRST = (
    "date", "commit", "hardware", "torch", "dear", "backbone", "protocol", "method", "recipe", "changed",
    "roles", "mode", "dataset",
)  # fmt: skip
THEN = ("template", "held_out", "shots", "seed")
METRICS = (
    "base", "novel", "hm", "joint", "joint_base", "joint_novel", "joint_hm", "ece_base", "ece_novel",
    "ece_joint", "accuracy", "target", "validation",
)  # fmt: skip
LAST = ("trainable_parameters", "adapter_bytes", "steps", "train_s")


def changed(cell: Cell) -> str:
    """Options and recipe as far as they differ from the method's own, as `name=value` words."""
    kind = find_method(cell.method)
    usual = json.loads(json.dumps(dataclasses.asdict(kind.Config())))
    recipe = json.loads(json.dumps(dataclasses.asdict(Recipe.of(kind))))
    options, training = cell.spec.options, cell.spec.recipe
    pairs = [(name, value) for name, value in options.items() if value != usual.get(name)]
    pairs += [
        (f"recipe.{name}" if name in options else name, value)
        for name, value in training.items()
        if value != recipe.get(name) and name != "seed"
    ]
    return " ".join(f"{name}={value}" for name, value in sorted(pairs))


def rows_of(
    cell: Cell, result: Mapping[str, Any], backbone: str | None, date: str
) -> Iterable[dict[str, Any]]:
    """One row per mode; for transfer one row per mode and tested dataset."""
    made, seconds = result["made_with"], result["seconds"]
    preset = preset_of(cell)
    common = {
        "date": date, "hardware": made["hardware"], "torch": made["torch"], "dear": made["dear"],
        "backbone": backbone or cell.spec.backbone, "protocol": cell.protocol,
        "method": f"{cell.method}@{preset}" if preset else cell.method,
        "changed": "" if preset else changed(cell), "roles": cell.roles,
        "template": cell.spec.template, "held_out": cell.setting.get("held_out", ""),
        "shots": cell.shots, "seed": cell.seed,
        "trainable_parameters": result["trainable_parameters"], "adapter_bytes": result["adapter_bytes"],
        "steps": result.get("steps", 0), "train_s": seconds["train"],
    }  # fmt: skip
    protocol = find_protocol(cell.protocol)
    names = {name: name for name in (cell.dataset, *cell.setting.get("targets", ()))}
    held_out = f"/{cell.setting['held_out']}" if "held_out" in cell.setting else ""
    for mode, values in result["modes"].items():
        by_dataset: dict[str, dict[str, Any]] = {}
        for column, value in values.items():
            dataset, heading = protocol.column_of(cell, column, names)
            by_dataset.setdefault(dataset.removesuffix(held_out), {})[heading] = value
        for dataset, columns in by_dataset.items():
            yield {**common, "mode": mode, "dataset": dataset, **columns}


def collect(
    grids: Sequence[str], backbone: str | None, roles: str = "", commit: str = "", recipe: str = ""
) -> list[dict[str, Any]]:
    """Rows of all cells in the folders, sorted, to four digits.

    `roles` names the grid's own map, `commit` the code, `recipe` the version of DeAR's `strong`.
    """
    rows = []
    for folder in grids:
        grid = Grid(folder)
        for cell, result in grid.documents():
            stamp = datetime.date.fromtimestamp(grid.path(cell).stat().st_mtime).isoformat()
            for row in rows_of(cell, result, backbone, stamp):
                if cell.spec.roles_digest and not row["roles"]:
                    row["roles"] = roles
                row |= {"commit": commit, "recipe": recipe if row["method"] == "dear@strong" else ""}
                rows.append({k: f"{v:.4g}" if k in METRICS and v is not None else v for k, v in row.items()})
    shown = short_names(row["dataset"] for row in rows)  # paths of one machine mean nothing on another
    rows = [{**row, "dataset": shown[row["dataset"]]} for row in rows]
    return sorted(rows, key=lambda row: tuple(str(row.get(k, "")) for k in FIRST[5:] + THEN))


def write(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """All columns that any row fills."""
    names = [k for k in FIRST + THEN + METRICS + LAST if any(row.get(k) not in (None, "") for row in rows)]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def show(path: str) -> str:
    """The CSV as a Markdown table of means over seeds."""
    rows = read(path)
    across = "held_out" if rows[0].get("held_out") else "dataset"
    columns = list(dict.fromkeys(row[across] for row in rows))
    table: dict[str, dict[str, list[dict[str, str]]]] = {}
    for row in rows:
        words = [row["method"], "" if row["mode"] == "default" else row["mode"]]
        words += [row.get("changed", ""), row.get("roles", "")]
        if row["protocol"] == "few-shot":
            words.append(f"{row['shots']} shots")
        name = ", ".join(word for word in words if word)
        table.setdefault(name, {}).setdefault(row[across], []).append(row)
    lines = [(name, *(field(cells.get(column, [])) for column in columns)) for name, cells in table.items()]
    return markdown(("method", *columns), lines)


def field(rows: Sequence[Mapping[str, str]]) -> str:
    """Base / novel / HM, or the one accuracy there is, with the number of seeds where it is not three."""
    parts = []
    for metric in ("base", "novel", "hm", "accuracy", "target"):
        values = [float(row[metric]) for row in rows if row.get(metric)]
        if values:
            parts.append(f"{100 * statistics.mean(values):.1f}")
    seeds = {row["seed"] for row in rows}
    return " / ".join(parts) + (f" ({len(seeds)} seeds)" if rows and len(seeds) != 3 else "")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("grids", nargs="*", help="folders written by dear bench or dear ablate")
    parser.add_argument("--csv", help="file to write")
    parser.add_argument("--backbone", help="name of the backbone in the CSV, instead of the cell's")
    parser.add_argument("--roles", default="", help="how the role map was made, for the CSV")
    parser.add_argument("--commit", default="", help="commit of the code that was run, for the CSV")
    parser.add_argument("--recipe", default="", help="version of DeAR's strong, for the CSV")
    parser.add_argument("--append", action="store_true", help="keep the rows that are in the CSV already")
    parser.add_argument("--show", metavar="CSV", help="print a collected CSV as Markdown")
    args = parser.parse_args()
    if args.show:
        print(show(args.show))
    elif args.grids and args.csv:
        rows = collect(args.grids, args.backbone, args.roles, args.commit, args.recipe)
        if not rows:
            parser.error(f"{', '.join(args.grids)}: no whole cell there; name folders written by dear bench")
        kept = read(args.csv) if args.append else []
        write([*kept, *rows], args.csv)
    else:
        parser.error("give grids and --csv, or --show CSV")


if __name__ == "__main__":
    main()
