"""Planted shortcuts, found and removed: accuracy for every way of removal, and how often audit is right.

    python benchmarks/shortcuts.py repair --out benchmarks/results/shortcuts.csv
    python benchmarks/shortcuts.py repair --methods coop,clip-lora,mmrl,dear@strong --correlations 1 \
        --seeds 1 --draws 1 --out benchmarks/results/shortcuts_trained.csv
    python benchmarks/shortcuts.py audit --out benchmarks/results/shortcuts_audit.csv
    python benchmarks/shortcuts.py table benchmarks/results/shortcuts.csv

Six classes of the attribute world, 16 images per class; in the test every class has every value. Ways:
balanced (nothing removed, but trained on images without the shortcut: what the backbone allows), untouched,
by heads, by words, by examples (5 images per value, on other classes), automatic, true heads (as many as the
role has, by `head_truth.json`), random heads (`--draws` draws). `linear-probe` and `tip-adapter-f` learn on
frozen features of the images as they are (no crops): one pass of the backbone serves all ways. The other
methods are trained with the library's own loop and their own settings, but not calibrated. Rows that the file
has already are not measured again.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from shortcut_parts import (
    BALANCED,
    backbone,
    draw_of,
    example_features,
    probe,
    rows,
    scored,
    seen,
    true_heads,
)
from torch import Tensor

from dear import world
from dear.data.images import values_of
from dear.heads.ablate import Collected
from dear.heads.audit import associate, judge, reliance
from dear.heads.choose import choose
from dear.heads.repair import Repair, remove_examples, remove_heads, remove_span
from dear.heads.roles import known_roles
from dear.heads.values import find_concept, known_concepts, value_features
from dear.methods import build_method, find_method
from dear.train import Recipe, evaluate
from dear.workflows.adapt import adapt
from dear.workflows.speed import add_rows, machine
from dear.workflows.without import ways_to_remove
from dear.world.shortcuts import KINDS

CACHED = ("linear-probe", "tip-adapter-f")
SHORTCUTS = tuple(kind for kind in KINDS if kind != "none")
CORRELATIONS = ("0.9", "0.95", "1")
WAYS = (
    "balanced", "untouched", "automatic", "words", "heads", "examples", "true heads", "random heads"
)  # fmt: skip
CELL = ("method", "shortcut", "correlation", "seed", "way", "draw")


def removals(
    method: str, kind: str, train_images: Collected, labels: Tensor, seed: int, device: str, draws: int
) -> Iterator[tuple[str, int, Repair, str]]:
    """(way, draw, removal, what automatic chose for the method) of a task and a draw of its images."""
    clip, concept = backbone(device), find_concept(KINDS[kind].concept)
    roles = known_roles(clip)
    assert roles is not None
    ways = ways_to_remove(clip, concept, train_images, roles)
    features, values = example_features(kind, seed, device)
    ways["examples"] = remove_examples(train_images, features, values, concept.name)
    inside = not find_method(method.partition("@")[0]).reads_feature
    choice = choose(train_images, labels, ways, heads_first=inside)
    for way in ("words", "heads", "examples"):
        if way in ways:
            yield way, 0, ways[way], ""
    yield "automatic", 0, choice.repair, choice.way
    count = max(len(roles.select(concept=concept.role)), 1)
    yield "true heads", 0, remove_heads(train_images, true_heads(concept.name, count), concept.name), ""
    rng, keys = random.Random(seed), [key for key, _ in roles]
    for draw in range(draws):
        yield "random heads", draw, remove_heads(train_images, rng.sample(keys, count), "random"), ""


def cached_answers(
    method_name: str, drawn: world.WorldImages, learn: Tensor, test: Tensor, seed: int, device: str
) -> Tensor:
    """Answers [n] of a method that reads frozen features only, trained on features by its own recipe."""
    clip, labels = backbone(device), drawn.labels
    method = build_method(method_name, clip, drawn.classes, template=drawn.template, seed=seed)
    if method_name == "tip-adapter-f":
        method.keys.data = F.normalize(learn, dim=-1)
        method.labels = labels
    recipe = Recipe.of(method, seed=seed)
    parameters = [p for p in method.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay)
    generator = torch.Generator().manual_seed(seed)
    batch = min(recipe.batch, len(labels))
    steps = recipe.epochs * -(-len(labels) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(recipe.epochs):
        for part in torch.randperm(len(labels), generator=generator).split(batch):
            optimizer.zero_grad()
            method.loss_from_frozen((learn[part],), labels[part]).total.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return method.logits_from_frozen((test,))[method.modes[0]].argmax(dim=1)


def measure(method: str, name: str, repair: Repair | None, seed: int, device: str) -> tuple[float, float]:
    """Mean and worst-group accuracy of a method trained on a draw of a task, with a removal."""
    clip, (drawn, places), test = backbone(device), draw_of(name, seed), world.task(name, "test")
    kind, _, preset = method.partition("@")
    if kind in CACHED:
        both = (rows(seen(name, "train", device), places), seen(name, "test", device))
        parts = [images.features if repair is None else repair.apply(images) for images in both]
        answers = cached_answers(kind, drawn, *parts, seed, device)
    else:
        fixed = clip if repair is None else clip.corrected(repair.correction())
        trained = adapt(
            drawn, method=kind, backbone=fixed, shots=0, seed=seed, preset=preset or None, calibrate=False
        )
        result = evaluate(trained.method, test)
        answers = result.answers[result.pick(None)]
    values = values_of(test)
    assert values is not None
    return scored(answers, test.labels, values)


def removal_key(row: Mapping[str, str]) -> tuple[str, ...]:
    """What a figure depends on: balanced images know no correlation, automatic is one of the other ways."""
    correlation = "" if row["way"] == "balanced" else row["correlation"]
    return row["method"], row["shortcut"], correlation, row["seed"], row["chosen"] or row["way"], row["draw"]


def cell(args: argparse.Namespace, cell_key: tuple[str, str, str, str], known: dict[str, Any]) -> None:
    """All ways of one method, shortcut, correlation and seed; each row is written when it is measured."""
    method, kind, correlation, seed = cell_key
    name = f"shortcut-{kind}@{correlation}"
    drawn, places = draw_of(name, int(seed))
    learn = rows(seen(name, "train", args.device), places)
    plans: list[tuple[str, int, Repair | None, str]] = [("balanced", 0, None, ""), ("untouched", 0, None, "")]
    plans += removals(method, kind, learn, drawn.labels, int(seed), args.device, args.draws)
    for way, draw, repair, chosen in sorted(plans, key=lambda plan: WAYS.index(plan[0])):
        row = dict(zip(CELL, (*cell_key, way, str(draw)), strict=True)) | {"chosen": chosen}
        if way not in args.ways or tuple(row[key] for key in CELL) in known["rows"]:
            continue
        figures, task = known["figures"], f"shortcut-{kind}@{BALANCED}" if way == "balanced" else name
        if removal_key(row) not in figures:
            figures[removal_key(row)] = measure(method, task, repair, int(seed), args.device)
        accuracy, worst = figures[removal_key(row)]
        row |= {"accuracy": f"{accuracy:.4f}", "worst_group": f"{worst:.4f}"}
        add_rows(Path(args.out), [{**row, **machine(torch.device(args.device))}])
    print(*cell_key, flush=True)


def repair_command(args: argparse.Namespace) -> None:
    """Measure what the file lacks."""
    known: dict[str, Any] = {"rows": set(), "figures": {}}
    if Path(args.out).exists():
        with open(args.out, newline="") as file:
            for row in csv.DictReader(file):
                known["rows"].add(tuple(row[key] for key in CELL))
                known["figures"][removal_key(row)] = (float(row["accuracy"]), float(row["worst_group"]))
    for kind, correlation in itertools.product(args.shortcuts, args.correlations):
        for seed, method in itertools.product(args.seeds, args.methods):
            cell(args, (method, kind, correlation, seed), known)


def verdict_of(name: str, seed: int, device: str) -> dict[str, str]:
    """The verdict on each of the twelve concepts for one draw, with the reliance of a linear probe."""
    clip = backbone(device)
    drawn, places = draw_of(name, seed)
    learn = rows(seen(name, "train", device), places)
    texts = clip.encode_text([drawn.template.replace("{}", each) for each in drawn.classes]).float()
    weight, bias = probe(learn.features, drawn.labels)

    def scores(features: Tensor) -> Tensor:
        return F.normalize(features, dim=-1) @ weight.T + bias

    verdicts, own, roles = {}, scores(learn.features), known_roles(clip)
    assert roles is not None
    for name_of_concept in known_concepts():
        words, directions = values_in_words(name_of_concept, device)
        found = associate(name_of_concept, words, directions, learn.features, drawn.labels, texts, seed=seed)
        ways = [remove_span(learn, directions, name_of_concept)]
        heads = roles.select(concept=name_of_concept)
        ways += [remove_heads(learn, heads, name_of_concept)] if heads else []
        used = [reliance(own, scores(way.apply(learn)), drawn.labels) for way in ways]
        worst = max(used, key=lambda one: max(one.lost, one.changed))
        verdicts[name_of_concept] = judge(found, worst).verdict
    return verdicts


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
        add_rows(Path(args.out), found)
        hits = sum(row["verdict"] == "shortcut" for row in found)
        more = sum(bool(row["others_suspected"]) for row in found)
        print(f"{name}: the planted concept in {hits}, others in {more} of {len(found)} draws", flush=True)


def table_command(args: argparse.Namespace) -> None:
    """Means over seeds and draws as a Markdown table: worst group (mean), in percent."""
    cells: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    with open(args.csv, newline="") as file:
        for row in csv.DictReader(file):
            key = (row["method"], row["shortcut"], row["correlation"], row["way"])
            cells.setdefault(key, []).append((float(row["worst_group"]), float(row["accuracy"])))
    print("| method | shortcut | correlation | " + " | ".join(WAYS) + " |")
    print("|---|---|---|" + "---:|" * len(WAYS))
    for method, kind, correlation in dict.fromkeys(key[:3] for key in cells):
        shown = []
        for way in WAYS:
            found = cells.get((method, kind, correlation, way))
            if found is None:
                shown.append("")
            else:
                worst, mean = (100 * sum(column) / len(found) for column in zip(*found, strict=True))
                shown.append(f"{worst:.1f} ({mean:.1f})")
        print(f"| {method} | {kind} | {correlation} | " + " | ".join(shown) + " |")


def main() -> None:
    """Parse and run."""
    names = lambda text: text.split(",")  # noqa: E731
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(required=True)
    for title, command in (("repair", repair_command), ("audit", audit_command)):
        own = commands.add_parser(title)
        own.set_defaults(command=command)
        own.add_argument("--shortcuts", type=names, default=list(SHORTCUTS))
        own.add_argument("--correlations", type=names, default=list(CORRELATIONS))
        own.add_argument("--out", required=True)
        own.add_argument("--device", default="cpu")
        if title == "repair":
            own.add_argument("--methods", type=names, default=list(CACHED))
            own.add_argument("--ways", type=names, default=list(WAYS))
            own.add_argument("--seeds", type=names, default=["1", "2", "3"])
            own.add_argument("--draws", type=int, default=5, help="of random heads")
        else:
            own.add_argument("--draws", type=int, default=8, help="few-shot draws per task")
            own.add_argument("--control-draws", type=int, default=40)
    own = commands.add_parser("table")
    own.set_defaults(command=table_command)
    own.add_argument("csv")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.command(args)


if __name__ == "__main__":
    main()
