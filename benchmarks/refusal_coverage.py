r"""How often the share of refused images lies in the interval that a threshold states, over many draws.

    python benchmarks/refusal_coverage.py run --keep draws.csv --draws 200
    python benchmarks/refusal_coverage.py rows --keep draws.csv --csv benchmarks/results/refusal_coverage.csv

The images of a task of the attribute world (training and test images together) are encoded once. Each draw
takes k images per class at random, trains a method on them, calibrates it as `dear adapt` does, and refuses
images of the same classes among all others with `reject` = 5 %. `rows` counts how many draws refused a share
inside the interval stated for as many images, above it and below it. `--part 2/8` computes every eighth cell.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measure.script import add_options, names, numbers, parser_of, read, where
from torch import Tensor

import dear
from dear.calibration.reference import Reference
from dear.data.duplicates import Duplicates, find_duplicates
from dear.data.images import ImageSet
from dear.methods import build_method
from dear.methods.base import Method
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.runs.spec import Spec
from dear.shortcuts.edited_images import JoinedImages
from dear.tasks.speed import add_rows
from dear.train.calibrate import FOLDS, fit_calibration, with_nearness
from dear.train.crossval import Trials, held_out
from dear.train.frozen import FrozenViews
from dear.train.run import train
from dear.train.setup.prepare import explicit_options, recipe_for

SHARE = 0.05
METHODS = names("zeroshot,proker,lp-plus-plus,tip-adapter,linear-probe,clip-adapter,tip-adapter-f")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("action", choices=("run", "rows"))
    add_options(
        parser,
        backbone="mini",
        draws=200,
        first=(0, "number of the first draw"),
        step=(20, "draws of a cell before the next cell"),
        part=("1/1", "which part of the cells to compute, of how many equal parts"),
        keep=(Path, "CSV file of draws"),
        csv=(Path, "file to which rows are added"),
    )
    parser.add_argument("--tasks", type=names, default=["world:textures", "world:scenes"])
    parser.add_argument("--methods", type=names, default=METHODS)
    parser.add_argument("--shots", type=numbers, default=[2, 4, 8, 16])
    args = parser.parse_args()
    {"run": run, "rows": write_rows}[args.action](args)


def run(args: Any) -> None:
    """Draw, train, calibrate, and refuse; one row per draw."""
    clip = remember_texts(dear.load(args.backbone))
    encoded = {task: encode(task, clip) for task in args.tasks}
    part, parts = map(int, args.part.split("/"))
    cells = list(product(range(args.first, args.draws, args.step), args.methods, args.shots, args.tasks))
    for first, name, shots, task in cells[part - 1 :: parts]:
        images, views, copies = encoded[task]
        spec = Spec(data=task, method=name, shots=shots)
        options, template = explicit_options(spec), images.template
        method = build_method(name, clip, images.classes, template=template, **options)
        recipe = recipe_for(spec, method, torch.arange(len(images.classes)).repeat(shots))
        seeds = range(first, min(first + args.step, args.draws))
        facts = {"task": task, "method": name, "shots": shots}
        began = time.perf_counter()
        add_rows(
            args.keep,
            [facts | {"seed": k} | draw(method, images, views, copies, recipe, shots, k) for k in seeds],
        )
        print(*facts.values(), first, f"{time.perf_counter() - began:.1f} s", flush=True)


def remember_texts(clip: dear.Clip) -> dear.Clip:
    """The same backbone; it encodes each list of prompts once, because every fold of every draw has it."""
    encode_text, known = clip.encode_text, dict[bytes, Tensor]()

    def remembered(texts: Sequence[str] | Tensor) -> Tensor:
        ids = texts if isinstance(texts, Tensor) else clip.tokenize(texts)
        key = ids.cpu().numpy().tobytes()
        if key not in known:
            known[key] = encode_text(ids)
        return known[key]

    clip.encode_text = remembered  # type: ignore[method-assign]
    return clip


def encode(task: str, clip: dear.Clip) -> tuple[ImageSet, FrozenViews, Duplicates]:
    """All images of a task, their features, which methods on frozen features share, and their copies."""
    images = JoinedImages.of(*(dear.open_data(task, split) for split in ("train", "test")))
    frozen = build_method("zeroshot", clip, images.classes, template=images.template)
    return images, FrozenViews(frozen, images, Recipe(augment=False)), find_duplicates(images)


def write_rows(args: Any) -> None:
    """One row per task, method, and number of images."""
    cells: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for row in read(args.keep):
        key = tuple(row[name] for name in ("task", "method", "shots"))
        cells.setdefault(key, []).append({name: float(row[name]) for name in ("refused", "low", "high")})
    rows = [
        dict(zip(("task", "method", "shots"), key, strict=True)) | summary(draws)
        for key, draws in sorted(cells.items(), key=lambda item: (*item[0][:2], int(item[0][2])))
    ]
    for row in rows:
        print(row)
    if args.csv:
        add_rows(args.csv, [row | where() for row in rows])


def draw(
    start: Method,
    images: ImageSet,
    views: FrozenViews,
    copies: Duplicates,
    recipe: Recipe,
    shots: int,
    seed: int,
) -> dict[str, float]:
    """The share of refused images of one draw, and the interval stated for it."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    labels = images.labels[order]
    chosen = torch.cat([order[labels == label][:shots] for label in range(len(images.classes))])
    others = order[~torch.isin(order, chosen)]
    some, known = images.subset(chosen.tolist()), views.subset(chosen)
    method = start.untrained_copy(seed=seed)
    train(method, some, recipe, spec=Spec(), views=known)
    held = held_out(method, Trials(some, recipe, known, duplicates=copies.subset(chosen.tolist())), FOLDS)
    assert held is not None
    features = views.features(None, chosen.tolist()).x
    calibration = fit_calibration(held, [], method.open_classes, FOLDS)
    calibration = with_nearness(calibration, held, [], features, some.labels, method.classes)
    model = Model(method, calibration, reference=Reference.of(features, some.labels))
    mode, scale = model.modes[0], model.scale
    limit = scale.threshold(SHARE, mode)
    rest = views.subset(others)
    logits = model.logits(images.subset(others.tolist()), frozen=rest.inference())[mode]
    scaled = scale.calibrated(logits, mode)
    scores = scale.score(scaled, scale.nearness(rest.features(None, range(len(others))).x), mode)
    low, high = limit.among(len(others))
    return {"refused": float((scores < limit.value).double().mean()), "low": low, "high": high}


def summary(draws: list[dict[str, float]]) -> dict[str, Any]:
    """One row of many draws."""
    refused, low, high = (torch.tensor([one[key] for one in draws]) for key in ("refused", "low", "high"))
    inside = (refused >= low) & (refused <= high)
    values = {
        "refused_mean": refused.mean(),
        "low": low.mean(),
        "high": high.mean(),
        "inside": inside.double().mean(),
        "above": (refused > high).double().mean(),
        "below": (refused < low).double().mean(),
    }
    return {"draws": len(draws), **{name: round(float(value), 4) for name, value in values.items()}}


if __name__ == "__main__":
    main()
