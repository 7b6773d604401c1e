"""Planted shortcuts, found and removed: accuracy for every way of removal, and how often audit is right.

    python research/shortcuts/world.py repair --out research/results/shortcuts.csv
    python research/shortcuts/world.py audit --out research/results/shortcuts_audit.csv
    python research/shortcuts/world.py table research/results/shortcuts.csv

Six classes of the attribute world, 16 images per class; in the test every class has every value. Ways:
balanced (nothing removed, but trained on images without the shortcut: what the backbone allows), untouched,
by heads, by words, by examples (5 images per value, on other classes), automatic, true heads (as many as the
role has, by `head_truth.json`), random heads (`--draws` draws). `linear-probe` and `tip-adapter-f` learn on
frozen features of the images as they are (no crops): one pass of the backbone serves all ways. The other
methods are trained with the library's own loop and their own settings, but not calibrated. On a GPU many
small trainings share it, each process with one core (MPS lets their kernels run at once). From the root:

    export PYTHONPATH=src:pkgs:benchmarks OMP_NUM_THREADS=1; nvidia-cuda-mps-control -d
    timeout 400 python research/shortcuts/world.py repair --device cuda --jobs 14 --draws 2 --out FILE \
        --methods coop,clip-lora,mmrl,tip-adapter-f,dear@quick --shortcuts place,color,texture,text

Rows are written as they are measured, one seed of everything after the other, DeAR first. Rows that the file
has are not measured again, so the same command goes on where it was stopped; a training that fails is named
and left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure.jobs import workers
from measure.script import add_options, markdown, names, parser_of, read
from measure.world import BALANCED, backbone, draw_of, probe, rows, seen
from torch import Tensor
from world_cells import CACHED, Plan, measure, plans, split_method

from dear.heads.concept_words import known_concepts, value_features
from dear.heads.known_roles import known_roles
from dear.methods import find_method
from dear.shortcuts.removal import Removal, remove_heads, remove_span
from dear.tasks.audit.association import associate
from dear.tasks.audit.reliance import reliance
from dear.tasks.audit.verdict import explain_away, judge
from dear.tasks.speed import add_rows, machine
from dear.world.shortcuts import KINDS

SHORTCUTS = tuple(kind for kind in KINDS if kind != "none")
CORRELATIONS = ("0.9", "0.95", "1")
WAYS = (
    "balanced", "untouched", "automatic", "words", "heads", "examples", "true heads", "random heads"
)  # fmt: skip
CELL = ("method", "shortcut", "correlation", "seed", "way", "draw")

Task = tuple[str, str, str]  #: shortcut, correlation, seed
Row = dict[str, Any]


def figure_key(row: Mapping[str, str]) -> tuple[str, ...]:
    """What a figure depends on: balanced images know no correlation, automatic is one of the other ways."""
    correlation = BALANCED if row["way"] == "balanced" else row["correlation"]
    return row["method"], row["shortcut"], correlation, row["seed"], row["chosen"] or row["way"], row["draw"]


def known_rows(path: Path) -> tuple[set[tuple[str, ...]], dict[tuple[str, ...], Row]]:
    """The cells that a file has, and the figures in it by what they depend on."""
    rows = read(path)
    figures = {
        figure_key(row): {key: row[key] for key in row if key not in (*CELL, "chosen")} for row in rows
    }
    return {tuple(row[key] for key in CELL) for row in rows}, figures


def cells(
    args: argparse.Namespace, planned: Mapping[Task, list[Plan]]
) -> Iterator[tuple[Row, Removal | None]]:
    """All rows that are asked for: one seed of everything after the other, DeAR first within a seed."""
    methods = sorted(args.methods, key=lambda method: not method.startswith("dear"))
    for seed, last, method in product(args.seeds, (False, True), methods):
        inside = find_method(split_method(method)[0]).cut != "feature"
        for kind, correlation in product(args.shortcuts, args.correlations):
            for plan in planned.get((kind, correlation, seed), ()):
                fits = plan.inside in (None, inside) and (plan.way == "balanced") == last
                if plan.way in args.ways and fits:
                    cell = (method, kind, correlation, seed, plan.way, str(plan.draw))
                    yield dict(zip(CELL, cell, strict=True)) | {"chosen": plan.chosen}, plan.repair


def repair_command(args: argparse.Namespace) -> None:
    """Measure what the file lacks; rows that depend on the same figure are measured once."""
    there, figures = known_rows(args.out)
    tasks: list[Task] = [
        (kind, correlation, seed)
        for seed, kind, correlation in product(args.seeds, args.shortcuts, args.correlations)
    ]
    with workers(args.jobs) as run:
        found = run(plans, [(*task, args.device, args.draws) for task in tasks])
        planned = {tasks[number]: plan for number, plan in found}
        print(f"{len(planned)} of {len(tasks)} tasks are planned", flush=True)
        waiting: dict[tuple[str, ...], list[Row]] = {}
        calls: dict[tuple[str, ...], tuple[Any, ...]] = {}
        for row, repair in cells(args, planned):
            if tuple(row[key] for key in CELL) not in there:
                key = figure_key(row)
                waiting.setdefault(key, []).append(row)
                calls.setdefault(key, (*key[:4], repair, args.device, args.epochs))
        for key in calls:
            if key in figures:
                add_rows(args.out, [{**row, **figures[key]} for row in waiting[key]])
        missing = [key for key in calls if key not in figures]
        print(f"{len(missing)} trainings for {sum(len(waiting[key]) for key in missing)} rows", flush=True)
        for number, result in run(measure, [calls[key] for key in missing]):
            add_rows(args.out, [{**row, **result} for row in waiting[missing[number]]])
            print(*missing[number], result["worst_group"], flush=True)


def verdict_of(name: str, seed: int, device: str) -> dict[str, str]:
    """The verdict on each of the twelve concepts for one draw, with the reliance of a linear probe."""
    clip = backbone(device)
    drawn, places = draw_of(name, seed)
    learn = rows(seen(name, "train", device), places)
    texts = clip.encode_text([drawn.template.replace("{}", each) for each in drawn.classes]).float()
    weight, bias = probe(learn.features, drawn.labels)

    def scores(features: Tensor) -> Tensor:
        return F.normalize(features, dim=-1) @ weight.T + bias

    findings, spans, own, roles = [], {}, scores(learn.features), known_roles(clip)
    assert roles is not None
    for name_of_concept in known_concepts():
        words, directions = values_in_words(name_of_concept, device)
        found = associate(name_of_concept, words, directions, learn.features, drawn.labels, texts, seed=seed)
        ways = [remove_span(learn, directions, name_of_concept)]
        heads = roles.select(concept=name_of_concept)
        ways += [remove_heads(learn, heads, name_of_concept)] if heads else []
        used = [reliance(own, scores(way.apply(learn)), drawn.labels) for way in ways]
        worst = max(used, key=lambda one: max(one.lost, one.changed))
        findings.append(judge(found, worst))
        spans[name_of_concept] = directions
    told = explain_away(findings, spans, learn.features, drawn.labels, seed)
    return {one.association.concept: one.verdict for one in told}


@lru_cache(maxsize=12)
def values_in_words(concept: str, device: str) -> tuple[tuple[str, ...], Tensor]:
    """The values of a concept and their text features."""
    return value_features(backbone(device), known_concepts()[concept])


def audit_command(args: argparse.Namespace) -> None:
    """How often the planted concept is suspected, and how often anything is in the control."""
    names = [f"shortcut-{kind}@{correlation}" for kind in args.shortcuts for correlation in args.correlations]
    for name in (*names, *["shortcut-none"] * bool(args.control_draws)):
        kind = name.removeprefix("shortcut-").partition("@")[0]
        planted = "" if kind == "none" else KINDS[kind].concept
        found = []
        for seed in range(1, 1 + (args.control_draws if kind == "none" else args.draws)):
            verdicts = verdict_of(name, seed, args.device)
            others = [key for key, verdict in verdicts.items() if verdict == "shortcut" and key != planted]
            row = {"data": name, "seed": seed, "planted": planted}
            row |= {"verdict": verdicts.get(planted, ""), "others_suspected": " ".join(others)}
            found.append({**row, **machine(torch.device(args.device))})
        add_rows(args.out, found)
        hits = sum(row["verdict"] == "shortcut" for row in found)
        more = sum(bool(row["others_suspected"]) for row in found)
        print(f"{name}: the planted concept in {hits}, others in {more} of {len(found)} draws", flush=True)


def table_command(args: argparse.Namespace) -> None:
    """Means over seeds and draws as a Markdown table: worst group (mean), in percent; later files count."""
    import pandas as pd

    rows = pd.concat(pd.read_csv(path, dtype={"correlation": str}) for path in args.csv)
    rows = rows.drop_duplicates(list(CELL), keep="last")
    means = 100 * rows.groupby([*CELL[:3], "way"], sort=False)[["worst_group", "accuracy"]].mean()
    shown = means.apply(lambda row: f"{row['worst_group']:.1f} ({row['accuracy']:.1f})", axis=1)
    wide = shown.unstack("way", fill_value="").reindex(columns=list(WAYS))
    table = wide.fillna("").reset_index()
    print(markdown(list(table), table.to_numpy().tolist(), words=3))


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True)
    for title, command in (("repair", repair_command), ("audit", audit_command)):
        own = commands.add_parser(title)
        own.set_defaults(command=command)
        own.add_argument("--shortcuts", type=names, default=list(SHORTCUTS))
        own.add_argument("--correlations", type=names, default=list(CORRELATIONS))
        own.add_argument("--out", type=Path, required=True)
        add_options(own, device="cpu")
        if title == "repair":
            own.add_argument("--methods", type=names, default=list(CACHED))
            own.add_argument("--ways", type=names, default=list(WAYS))
            own.add_argument("--seeds", type=names, default=["1", "2", "3"])
            add_options(own, draws=(5, "of random heads"), jobs=(1, "processes that share the device"))
            add_options(own, epochs=(0, "of trained methods, for a trial; 0: their own"))
        else:
            add_options(own, draws=(8, "few-shot draws per task"), control_draws=40)
    own = commands.add_parser("table")
    own.set_defaults(command=table_command)
    own.add_argument("csv", nargs="+")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.command(args)


if __name__ == "__main__":
    main()
