"""Focus: accuracy with the heads of one role beside the whole image feature.

    python research/heads/focus.py roles --out research/results/focus.csv
    python research/heads/focus.py auto --out research/results/focus_auto.csv
    python research/heads/focus.py auto --backbone small --roles roles.json --data pets=pets.csv --out …
    python research/heads/focus.py dear --out research/results/focus_dear.csv
    python research/heads/focus.py table research/results/focus.csv

`roles`: scenes of the attribute world in which everything but one attribute varies (`drawn:place`, …), and
the world's tasks, each with the heads of its own role, as many random heads (which is also what a shuffled
role map gives), the heads of the other core roles, and the heads alone; logistic regression on 1, 4 and 16
images per class, five draws. `auto`: what `--focus auto` chooses with 1, 2, 4 and 16 images per class, what
it gains, and the same with the roles of the map shuffled over its heads. `dear`: DeAR trained on the first
half of the classes without a focus, with the heads of the task's role, and the same with shuffled roles, each
with the values of `center` in --centers.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from measure.script import add_options, markdown, names, parser_of, record
from torch import Tensor

import dear
from dear import world
from dear.clip.model import Clip
from dear.data import open_data
from dear.data.batches import pixels_for
from dear.data.shots import few_shot
from dear.heads.collect import HeadContributions, collect_contributions
from dear.heads.focus import (
    FocusChoice,
    attribute_heads,
    centered_unit,
    choose_focus,
    enough_to_measure,
    focus_by_names,
)
from dear.heads.known_roles import known_roles, read_roles
from dear.heads.names import Head
from dear.heads.rules import derive_roles
from dear.methods import DeAR, DeARConfig
from dear.runs.recipe import Recipe
from dear.tasks.mini.measure import batches
from dear.train.run import train as train_method
from dear.train.setup.balance import enough_steps
from dear.world import factors as W

DRAWS = 5
DRAWN = {"place": ("Location", W.PLACE), "color": ("Color", W.COLOR), "texture": ("Texture", W.TEXTURE)}
ROLE = {"scenes": "Location", "emblems": "Color", "textures": "Texture", "fauna": "Object"}
TASKS = ("scenes", "emblems", "textures", "fauna", "vehicles", "mixed")
_VALUES = 12

Split = tuple[HeadContributions, Tensor]  #: contributions and labels


def drawn_scenes(clip: Clip, layers: Sequence[int], number: int) -> Split:
    """Scenes of shapes, and the values of all their factors [n, F]."""
    scenes = world.sample(number, torch.Generator().manual_seed(7), kinds=(W.SHAPE,))
    return collect_contributions(clip, batches(clip, scenes), layers), scenes.factors()


def of_factor(images: HeadContributions, factors: Tensor, column: int) -> tuple[Split, Split]:
    """The images that show one of the first twelve values of a factor: half to train on, half to test."""
    rows = ((factors[:, column] >= 0) & (factors[:, column] < _VALUES)).nonzero()[:, 0]
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    first, second = ((images.subset(half), factors[half, column]) for half in halves)
    return first, second


def few(labels: Tensor, shots: int, seed: int) -> Tensor:
    """Places of `shots` images of every class."""
    rng = torch.Generator().manual_seed(seed)
    own = [(labels == label).nonzero()[:, 0] for label in labels.unique()]
    return torch.cat([places[torch.randperm(len(places), generator=rng)[:shots]] for places in own])


def accuracy(parts: Sequence[tuple[float, Tensor, Tensor]], labels: Tensor, truth: Tensor) -> float:
    """Of a logistic regression on weighted unit parts [n, E], centered on the training images; in percent."""
    from sklearn.linear_model import LogisticRegression

    learn, test = [], []
    for weight, own, other in parts:
        unit, center = centered_unit(own)
        learn.append(weight * unit)
        test.append(weight * centered_unit(other, center)[0])
    model = LogisticRegression(C=100, max_iter=300).fit(torch.cat(learn, dim=1).numpy(), labels.numpy())
    return 100 * float((model.predict(torch.cat(test, dim=1).numpy()) == truth.numpy()).mean())


def measure(
    train: Split,
    test: Split,
    heads: Sequence[Head] | None,
    rows: Tensor,
    weight: float = 1.0,
    whole: bool = True,
) -> float:
    """Accuracy with some heads beside the whole feature, or alone."""
    parts = [(1.0, train[0].features[rows], test[0].features)] if whole else []
    if heads:
        parts.append((weight, train[0].contribution(heads)[rows], test[0].contribution(heads)))
    return accuracy(parts, train[1][rows], test[1])


def roles_command(args: argparse.Namespace) -> None:
    """The heads of a role against random heads and other roles."""
    clip = dear.load("mini")
    roles = known_roles(clip)
    assert roles is not None
    spaces, every = attribute_heads(roles), [key for key, _ in roles]
    tasks: dict[str, tuple[str, Split, Split]] = {}
    images, factors = drawn_scenes(clip, roles.layers, args.images)
    for name, (role, column) in DRAWN.items():
        tasks[f"drawn:{name}"] = (role, *of_factor(images, factors, column))
    for name, role in ROLE.items():
        tasks[f"world:{name}"] = (role, *splits(clip, f"world:{name}", roles.layers))
    for task, (role, train, test) in tasks.items():
        own = spaces[role]
        others = [key for name in roles.core if name != role for key in spaces.get(name, ())]
        for shots in (1, 4, 16):
            for seed in range(DRAWS):
                rows = few(train[1], shots, seed)
                drawn = [random.Random(f"{seed} {n}").sample(every, len(own)) for n in range(3)]
                row = {
                    "whole": measure(train, test, None, rows),
                    "role": measure(train, test, own, rows),
                    "role_alone": measure(train, test, own, rows, whole=False),
                    "random": mean(measure(train, test, heads, rows) for heads in drawn),
                    "other_roles": measure(train, test, others, rows),
                }
                head = {"task": task, "focus": role, "heads": len(own), "images": shots, "seed": seed}
                rounded = {key: round(value, 2) for key, value in row.items()}
                record(args.out, [{**head, **rounded}], machine_last=True)


def splits(clip: Clip, data: str, layers: Sequence[int], each: int = 60) -> tuple[Split, Split]:
    """Training images of a dataset, and up to `each` test images per class."""
    sets = [open_data(data, split) for split in ("train", "test")]
    sets[1] = sets[1].subset(few(sets[1].labels, each, 0).tolist())
    first, second = ((collect_contributions(clip, images, layers), images.labels) for images in sets)
    return first, second


def auto_command(args: argparse.Namespace) -> None:
    """What `auto` chooses and gains."""
    clip = dear.load(args.backbone)
    roles = known_roles(clip) if args.roles is None else read_roles(args.roles)
    assert roles is not None
    spaces, every = attribute_heads(roles), [key for key, _ in roles]
    data = dict(pair.split("=", 1) for pair in args.data) or {name: f"world:{name}" for name in TASKS}
    kept = torch.load(args.cache, weights_only=False) if args.cache and args.cache.exists() else {}
    for task, source in data.items():
        if task not in kept:
            kept[task] = splits(clip, source, roles.layers)
            if args.cache:
                torch.save(kept, args.cache)
        train, test = kept[task]
        classes = open_data(source, "train").classes
        for shots in (1, 2, 4, 16):
            for seed in range(DRAWS):
                rows = few(train[1], shots, seed)
                order = random.Random(seed).sample(every, len(every))
                moved = dict(zip(every, order, strict=True))
                shuffled = {name: tuple(moved[key] for key in heads) for name, heads in spaces.items()}
                base = measure(train, test, None, rows)
                for kind, heads in (("auto", spaces), ("shuffled", shuffled)):
                    found = choice(clip, train, rows, heads, classes)
                    got = measure(train, test, found.heads or None, rows, found.weight)
                    head = {"backbone": clip.name, "task": task, "map": kind, "images": shots, "seed": seed}
                    head["tested"] = len(test[1])
                    row = {"role": found.role or "none", "weight": found.weight, "whole": round(base, 2)}
                    record(args.out, [{**head, **row, "chosen": round(got, 2)}], machine_last=True)


def choice(
    clip: Clip, train: Split, rows: Tensor, heads: Mapping[str, tuple[Head, ...]], classes: Sequence[str]
) -> FocusChoice:
    """What `--focus auto` chooses on some training images."""
    labels = train[1][rows]
    if not enough_to_measure(labels):
        return focus_by_names(clip, classes, heads)
    parts = {name: train[0].contribution(own)[rows] for name, own in heads.items()}
    return choose_focus(train[0].features[rows], parts, labels, heads)


def dear_command(args: argparse.Namespace) -> None:
    """DeAR with and without a focus: base, novel, HM, and accuracy over the joint list."""
    clip = dear.load("mini")
    known = known_roles(clip)
    assert known is not None
    for seed, center, task, shots, which in product(
        args.seeds, args.centers, args.tasks, args.shots, args.maps
    ):
        roles = derive_roles(known, which) if which.startswith("shuffled") else known
        whole, test = (open_data(f"world:{task}", split) for split in ("train", "test"))
        half = len(whole.classes) // 2
        drawn = few_shot(whole.select_classes(whole.classes[:half]), int(shots), int(seed))
        role = ROLE[task]
        heads = () if which == "none" else attribute_heads(roles)[role]
        options = {"focus": heads, "focus_share": args.share, "center": float(center)}
        model = DeAR(clip, drawn.classes, roles=roles, template=drawn.template, seed=int(seed), **options)
        train_method(model, drawn, enough_steps(Recipe.of(model, seed=int(seed)), len(drawn)))
        answers = model.with_classes(test.classes, test.template)
        rows = torch.arange(len(test)).split(200)
        scores = torch.cat([answers.logits(pixels_for(clip, test, part.tolist())) for part in rows])
        old = test.labels < half
        base = float((scores[old][:, :half].argmax(1) == test.labels[old]).double().mean())
        new = float((scores[~old][:, half:].argmax(1) == test.labels[~old] - half).double().mean())
        joint = float((scores.argmax(1) == test.labels).double().mean())
        head = {"task": task, "focus": role, "map": which, "share": args.share, "center": float(center)}
        head |= {"images": shots, "seed": seed}
        found = {"base": base, "novel": new, "hm": 2 * base * new / (base + new), "joint": joint}
        rounded = {name: round(100 * value, 2) for name, value in found.items()}
        record(args.out, [{**head, **rounded}], machine_last=True)


def table_command(args: argparse.Namespace) -> None:
    """Means over draws as a Markdown table."""
    import pandas as pd

    rows = pd.read_csv(args.csv)
    by = ["task", "images"]
    if "chosen" in rows:
        kinds = rows.pivot_table("chosen", by, "map", sort=False)
        names = rows[rows["map"] == "auto"].groupby(by, sort=False)["role"]
        shown = pd.DataFrame({"whole": rows.groupby(by, sort=False)["whole"].mean(), "auto": kinds["auto"]})
        shown["chosen"] = names.agg(lambda own: ", ".join(f"{n} {k}" for n, k in own.value_counts().items()))
        shown["auto, roles shuffled"] = kinds["shuffled"]
    elif "novel" in rows:
        rows["map"] = rows["map"].str.partition(":")[0]
        by = ["task", "images", "share", "center", "map"]
        shown = rows.groupby(by)[["base", "novel", "hm", "joint"]].mean()
    else:
        columns = ["whole", "role", "role_alone", "random", "other_roles"]
        shown = rows.groupby(["task", "focus", "heads", "images"], sort=False)[columns].mean()
    table = shown.reset_index()
    print(markdown(list(table), table.to_numpy().tolist()))


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True)
    own = commands.add_parser("roles")
    own.set_defaults(command=roles_command)
    add_options(own, images=(2400, "drawn scenes"))
    own.add_argument("--out", type=Path, required=True)
    own = commands.add_parser("auto")
    own.set_defaults(command=auto_command)
    add_options(own, backbone="mini", cache=(Path, "file to keep contributions in between runs"))
    add_options(own, roles=(str, "role map; the backbone's own if left out"))
    own.add_argument(
        "--data", action="append", default=[], help="NAME=what open_data takes; the world's tasks"
    )
    own.add_argument("--out", type=Path, required=True)
    own = commands.add_parser("dear")
    own.set_defaults(command=dear_command)
    own.add_argument("--tasks", type=names, default=["scenes", "textures"])
    own.add_argument("--shots", type=names, default=["1", "4", "16"])
    own.add_argument("--seeds", type=names, default=["1", "2"])
    own.add_argument("--maps", type=names, default=["none", "own", "shuffled:1"])
    own.add_argument("--centers", type=names, default=[str(DeARConfig.center)])
    add_options(own, share=(DeARConfig.focus_share, "of the heads"))
    own.add_argument("--out", type=Path, required=True)
    own = commands.add_parser("table")
    own.set_defaults(command=table_command)
    own.add_argument("csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.command(args)


if __name__ == "__main__":
    main()
