"""Planted shortcuts, found and removed: accuracy for every way of removal, and how often audit is right.

    python benchmarks/shortcuts.py repair --out benchmarks/results/shortcuts.csv
    python benchmarks/shortcuts.py audit --out benchmarks/results/shortcuts_audit.csv
    python benchmarks/shortcuts.py table benchmarks/results/shortcuts.csv

Six animals of the attribute world, 16 images per class; in the test every animal has every value. Ways:
untouched, by heads, by words, by examples (5 images per value, animals of other classes), automatic, true
heads (as many as the role has, by `head_truth.json`), random heads (five draws). `linear-probe` and
`tip-adapter-f` learn on frozen features of the images as they are (no crops): one pass of the backbone
serves all ways. The other methods are trained with the library's own loop; `--jobs` runs cells in so many
processes, each on `--device`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import dear
from dear import world
from dear.clip.factory import EMBEDDED
from dear.clip.images import normalize
from dear.clip.model import Clip
from dear.data import few_shot
from dear.data.images import values_of
from dear.heads.ablate import Collected, collect
from dear.heads.audit import associate, judge, reliance
from dear.heads.choose import choose
from dear.heads.known import known_roles
from dear.heads.repair import Repair, remove_examples, remove_heads
from dear.heads.values import find_concept, known_concepts, value_features
from dear.methods import build_method
from dear.train import Recipe, evaluate
from dear.workflows.without import ways_to_remove
from dear.world import factors as W
from dear.world.renderer import compose, in_style, paste, to_bytes
from dear.world.scenes import sample
from dear.world.shortcuts import CLASSES, KINDS

CACHED = ("linear-probe", "tip-adapter-f")
SHORTCUTS = ("place", "color", "texture", "text")
CORRELATIONS = ("0.9", "0.95", "1")
WAYS = ("untouched", "heads", "words", "examples", "automatic", "true heads", "random heads")
DRAWS = 5
FIELDS = ("method", "shortcut", "correlation", "seed", "way", "draw", "accuracy", "worst_group", "chosen")


@lru_cache(maxsize=1)
def backbone(device: str = "cpu") -> Clip:
    return dear.load("mini", device=device)


def rows(collected: Collected, places: Tensor) -> Collected:
    """Some images of what was collected."""
    return Collected(collected.features[places], collected.outputs[places], collected.maps, collected.layers)


@lru_cache(maxsize=40)
def seen(name: str, split: str, device: str = "cpu") -> Collected:
    """Contributions of all images of a split, one pass."""
    roles = known_roles(backbone(device))
    assert roles is not None
    return collect(backbone(device), world.task(name, split), roles.layers)


def draw_of(name: str, seed: int) -> tuple[world.WorldImages, Tensor]:
    """The few-shot draw and its places in the training split."""
    images = world.task(name, "train")
    drawn = few_shot(images, 16, seed)
    place = {images.key(index): index for index in range(len(images))}
    return drawn, torch.tensor([place[drawn.key(index)] for index in range(len(drawn))])  # type: ignore[return-value]


@lru_cache(maxsize=40)
def example_features(kind: str, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Features [30, E] and values [30] of examples: five per value, animals of other classes."""
    shortcut, clip = KINDS[kind], backbone(device)
    generator = torch.Generator().manual_seed(1000 + seed)
    drawn = sample(30, generator, kinds=(W.ANIMAL,), avoid_held_out=False)
    others = [row for row, name in enumerate(W.SUBJECT_NAMES) if name in W.ANIMALS and name not in CLASSES]
    values = torch.arange(30) % len(shortcut.values)
    own = torch.tensor(shortcut.values)[values]
    fixed = {
        "subject": torch.tensor([others[index % len(others)] for index in range(30)]),
        "style": torch.zeros_like(drawn.style),
        "count": torch.ones_like(drawn.count),
    }
    if shortcut.factor != "letter":
        fixed[shortcut.factor] = own
    scenes = drawn.replace(**fixed)
    pixels = compose(scenes)
    if shortcut.factor == "letter":
        white, plain = torch.full_like(own, W.color_id("white")), torch.full_like(own, W.PLAIN)
        paste(pixels, scenes.replace(subject=own, color=white, texture=plain), torch.arange(30) % 4)
    raw = to_bytes(in_style(scenes, pixels).clamp(0, 1)).to(clip.device)
    return clip.encode_image(normalize(raw, clip.config.mean, clip.config.std)).cpu().float(), values


def true_heads(concept: str, count: int) -> list[tuple[int, int]]:
    """The heads whose contribution the concept's factor explains best."""
    table = json.loads((EMBEDDED / "mini" / "head_truth.json").read_text())["heads"]
    ranked = sorted(table, key=lambda row: -row["explained"][concept])
    return [(row["layer"], row["head"]) for row in ranked[:count]]


def removals(
    kind: str, train_images: Collected, labels: Tensor, seed: int, device: str
) -> Iterator[tuple[str, int, Repair | None, str]]:
    """(way, draw, removal, what automatic chose) of a cell."""
    clip, concept = backbone(device), find_concept(KINDS[kind].concept)
    roles = known_roles(clip)
    assert roles is not None
    ways = ways_to_remove(clip, concept, train_images, roles)
    features, values = example_features(kind, seed, device)
    ways["examples"] = remove_examples(train_images, features, values, concept.name)
    choice = choose(train_images, labels, ways)
    yield "untouched", 0, None, ""
    for way in ("heads", "words", "examples"):
        if way in ways:
            yield way, 0, ways[way], ""
    yield "automatic", 0, choice.repair, choice.way
    heads = roles.select(concept=concept.role)
    count = max(len(heads), 1)
    yield "true heads", 0, remove_heads(train_images, true_heads(concept.name, count), concept.name), ""
    rng, keys = random.Random(seed), [key for key, _ in roles]
    for draw in range(DRAWS):
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


def scored(answers: Tensor, labels: Tensor, values: tuple[str, ...]) -> tuple[float, float]:
    """Accuracy, and accuracy in the worst group of class and value."""
    right = (answers == labels).tolist()
    groups: dict[tuple[int, str], list[bool]] = {}
    for label, value, hit in zip(labels.tolist(), values, right, strict=True):
        groups.setdefault((label, value), []).append(hit)
    return sum(right) / len(right), min(sum(hits) / len(hits) for hits in groups.values())


def cell(task: tuple[str, str, str, int, str]) -> list[dict[str, object]]:
    """All ways of one method, shortcut, correlation and seed."""
    method_name, kind, correlation, seed, device = task
    torch.set_num_threads(1)
    clip, name = backbone(device), f"shortcut-{kind}@{correlation}"
    drawn, places = draw_of(name, seed)
    test_images = world.task(name, "test")
    learn = rows(seen(name, "train", device), places)
    found = []
    kind_of, _, preset = method_name.partition("@")
    for way, draw, repair, chosen in removals(kind, learn, drawn.labels, seed, device):
        if kind_of in CACHED:
            test = seen(name, "test", device)
            parts = [images.features if repair is None else repair.apply(images) for images in (learn, test)]
            answers = cached_answers(kind_of, drawn, *parts, seed, device)
        else:
            fixed = clip if repair is None else clip.corrected(repair.correction())
            from dear.workflows.adapt import adapt

            trained = adapt(drawn, method=kind_of, backbone=fixed, shots=0, seed=seed, preset=preset or None)
            result = evaluate(trained.method, test_images)
            answers = result.answers[result.pick(None)]
        values = values_of(test_images)
        assert values is not None
        accuracy, worst = scored(answers, test_images.labels, values)
        row = (method_name, kind, correlation, seed, way, draw, round(accuracy, 4), round(worst, 4), chosen)
        found.append(dict(zip(FIELDS, row, strict=True)))
    return found


def repair_command(args: argparse.Namespace) -> None:
    tasks = [
        (method, kind, correlation, seed, args.device)
        for kind in args.shortcuts
        for correlation in args.correlations
        for seed in args.seeds
        for method in args.methods
    ]
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = set()
    if out.exists():
        with out.open(newline="") as file:
            done = {tuple(row[key] for key in FIELDS[:4]) for row in csv.DictReader(file)}
    tasks = [task for task in tasks if tuple(map(str, task[:4])) not in done]
    fresh = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if fresh:
            writer.writeheader()

        def keep(found: list[dict[str, object]]) -> None:
            writer.writerows(found)
            file.flush()
            print(*(found[0][key] for key in FIELDS[:4]), flush=True)

        if args.jobs == 1:
            for task in tasks:
                keep(cell(task))
            return
        import multiprocessing

        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            for found in pool.map(cell, tasks):
                keep(found)


def verdict_of(name: str, seed: int, device: str) -> dict[str, str]:
    """The verdict on each of the twelve concepts for one draw, with the reliance of a linear probe."""
    clip = backbone(device)
    drawn, places = draw_of(name, seed)
    learn = rows(seen(name, "train", device), places)
    texts = clip.encode_text([drawn.template.replace("{}", each) for each in drawn.classes]).float()
    weight, bias = probe(learn.features, drawn.labels)

    def scores(features: Tensor) -> Tensor:
        return F.normalize(features, dim=-1) @ weight.T + bias

    verdicts = {}
    for concept in known_concepts().values():
        words, directions = value_features(clip, concept)
        found = associate(concept.name, words, directions, learn.features, drawn.labels, texts, seed=seed)
        own = scores(learn.features)
        used = [
            reliance(own, scores(way.apply(learn)), drawn.labels)
            for way in ways_to_remove(clip, concept, learn, known_roles(clip)).values()
        ]
        verdicts[concept.name] = judge(found, max(used, key=lambda one: max(one.lost, one.changed))).verdict
    return verdicts


def probe(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A logistic regression on unit features."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=100, max_iter=300).fit(F.normalize(features, dim=-1).numpy(), labels.numpy())
    return torch.from_numpy(model.coef_).float(), torch.from_numpy(model.intercept_).float()


def audit_command(args: argparse.Namespace) -> None:
    """How often the planted concept is suspected, and how often anything is in the control."""
    torch.set_num_threads(1)
    names = [f"shortcut-{kind}@{correlation}" for kind in args.shortcuts for correlation in args.correlations]
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("data", "seed", "planted", "verdict_on_planted", "others_suspected"))
        for name in (*names, "shortcut-none"):
            kind = name.removeprefix("shortcut-").partition("@")[0]
            planted = "" if kind == "none" else KINDS[kind].concept
            draws = args.control_seeds if kind == "none" else args.draws
            for seed in range(1, draws + 1):
                verdicts = verdict_of(name, seed, args.device)
                others = [
                    key for key, verdict in verdicts.items() if verdict == "shortcut" and key != planted
                ]
                writer.writerow((name, seed, planted, verdicts.get(planted, ""), " ".join(others)))
                file.flush()
            print(name, flush=True)


def table_command(args: argparse.Namespace) -> None:
    """Means over seeds and draws as a Markdown table."""
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
            own.add_argument(
                "--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[1, 2, 3]
            )
            own.add_argument("--jobs", type=int, default=1)
        else:
            own.add_argument("--draws", type=int, default=20)
            own.add_argument("--control-seeds", type=int, default=40)
    own = commands.add_parser("table")
    own.set_defaults(command=table_command)
    own.add_argument("csv")
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
