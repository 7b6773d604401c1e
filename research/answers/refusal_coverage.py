r"""How often the share of refused images lies in the interval that a threshold states, over many draws.

    python research/answers/refusal_coverage.py run --keep draws.csv --draws 200 --workers 16
    python research/answers/refusal_coverage.py rows --keep draws.csv \
        --csv research/results/refusal_coverage.csv

The images of a task of the attribute world (training and test images together) are encoded once. Each draw
takes k images per class at random, trains a method on their features, calibrates it as `dear adapt` does, and
refuses images of the same classes among all others with `reject` = 5 %. `rows` counts how many draws refused
a share inside the interval stated for as many images, above it and below it.

The method "drift" trains nothing: it compares the other images with those of the draw as `dear drift` does,
although nothing changed. `rows` counts how many p-values of the far images are below 5 % and 1 %.

Cells take turns, 20 draws each, so that a run that was stopped has about as many draws of each; the same
command goes on from there.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measure.script import add_options, names, numbers, parser_of, read, where
from torch import Tensor

import dear
from dear.calibration.calibration import threshold
from dear.calibration.reference import Reference
from dear.data.duplicates import Duplicates, find_duplicates
from dear.data.images import ImageSet
from dear.methods import build_method
from dear.methods.base import Method
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.runs.spec import Spec
from dear.shortcuts.edited_images import JoinedImages
from dear.tasks.drift import find_far
from dear.tasks.speed import add_rows
from dear.train.calibrate import FOLDS, fit_calibration, with_nearness
from dear.train.crossval import Trials, predict_held_out
from dear.train.frozen import FrozenViews
from dear.train.run import train
from dear.train.setup.prepare import explicit_options, recipe_for

SHARE = 0.05
METHODS = names("drift,zeroshot,proker,lp-plus-plus,tip-adapter,linear-probe,clip-adapter,tip-adapter-f")
Cell = tuple[int, int, str, str]  #: first draw, images per class, method, task
Encoded = tuple[ImageSet, FrozenViews, Duplicates]
SHARED: dict[str, Any] = {}  #: backbone, draws of a cell, and encoded tasks by name, in each process


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("action", choices=("run", "rows"))
    add_options(
        parser,
        backbone="mini",
        draws=200,
        step=(20, "draws of a cell before the next cell"),
        workers=(1, "processes"),
        keep=(Path, "CSV file of draws"),
        csv=(Path, "file to which rows are added"),
    )
    parser.add_argument("--tasks", type=names, default=["world:textures", "world:scenes"])
    parser.add_argument("--methods", type=names, default=METHODS)
    parser.add_argument("--shots", type=numbers, default=[16, 4, 8, 2])
    args = parser.parse_args()
    {"run": run, "rows": write_rows}[args.action](args)


def run(args: Any) -> None:
    """Draw, train, calibrate, and refuse; one row per draw."""
    clip = remember_texts(dear.load(args.backbone))
    began = time.perf_counter()
    encoded = {task: encode(task, clip) for task in args.tasks}
    print("encoded", f"{time.perf_counter() - began:.1f} s", flush=True)
    done = {(row["task"], row["method"], int(row["shots"]), int(row["seed"])) for row in read(args.keep)}
    cells = product(range(0, args.draws, args.step), args.shots, args.methods, args.tasks)
    cells = [cell for cell in cells if (cell[3], cell[2], cell[1], cell[0]) not in done]
    torch.set_num_threads(1)  # also of the processes
    context = multiprocessing.get_context("fork")  # shares what is encoded
    with context.Pool(args.workers, SHARED.update, [{"clip": clip, "step": args.step, **encoded}]) as pool:
        for rows in pool.imap_unordered(draws, cells):
            add_rows(args.keep, rows)
            print(*list(rows[0].values())[:4], flush=True)


def draws(cell: Cell) -> list[dict[str, Any]]:
    """The rows of one cell."""
    first, shots, name, task = cell
    clip, count, (images, views, copies) = SHARED["clip"], SHARED["step"], SHARED[task]
    facts = {"task": task, "method": name, "shots": shots}
    seeds = range(first, first + count)
    if name == "drift":
        return [facts | {"seed": seed} | far_images(images, views, shots, seed) for seed in seeds]
    spec = Spec(data=task, method=name, shots=shots)
    method = build_method(name, clip, images.classes, template=images.template, **explicit_options(spec))
    recipe = recipe_for(spec, method, torch.arange(len(images.classes)).repeat(shots))
    return [
        facts | {"seed": seed} | draw(method, images, views, copies, recipe, shots, seed) for seed in seeds
    ]


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


def encode(task: str, clip: dear.Clip) -> Encoded:
    """All images of a task, their features, which methods on frozen features share, and their copies."""
    images = JoinedImages.of(*(dear.open_data(task, split) for split in ("train", "test")))
    frozen = build_method("zeroshot", clip, images.classes, template=images.template)
    views = FrozenViews(frozen, images, Recipe(augment=False))
    views.features(None, [0])  # those of all images are computed
    return images, views, find_duplicates(images)


def write_rows(args: Any) -> None:
    """One row per task, method, and number of images."""
    cells: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for row in read(args.keep):
        key = tuple(row[name] for name in ("task", "method", "shots"))
        values = {name: float(row[name] or "nan") for name in ("refused", "low", "high", "far_p")}
        cells.setdefault(key, []).append(values)
    rows = [
        dict(zip(("task", "method", "shots"), key, strict=True)) | summary(draws)
        for key, draws in sorted(cells.items(), key=lambda item: (*item[0][:2], int(item[0][2])))
    ]
    for row in rows:
        print(row)
    if args.csv:
        add_rows(args.csv, [row | where() for row in rows])


def split(images: ImageSet, shots: int, seed: int) -> tuple[Tensor, Tensor]:
    """Places of `shots` images of each class, and of all other images."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    labels = images.labels[order]
    chosen = torch.cat([order[labels == label][:shots] for label in range(len(images.classes))])
    return chosen, order[~torch.isin(order, chosen)]


def far_images(images: ImageSet, views: FrozenViews, shots: int, seed: int) -> dict[str, Any]:
    """The share of far images of one draw, the interval where nothing changed, and the p-value."""
    chosen, others = split(images, shots, seed)
    features, rest = (views.features(None, rows.tolist()).x for rows in (chosen, others))
    reference = Reference.of(features, images.labels[chosen])
    far, p = find_far(reference.mutual_nearness, reference.nearness(rest))
    low, high = threshold(reference.mutual_nearness.tolist(), SHARE).among(len(others))
    return {"refused": float(far.double().mean()), "low": low, "high": high, "far_p": p}


def draw(
    start: Method,
    images: ImageSet,
    views: FrozenViews,
    copies: Duplicates,
    recipe: Recipe,
    shots: int,
    seed: int,
) -> dict[str, Any]:
    """The share of refused images of one draw, and the interval stated for it."""
    chosen, others = split(images, shots, seed)
    some, known = images.subset(chosen.tolist()), views.subset(chosen)
    method, recipe = start.untrained_copy(seed=seed), replace(recipe, seed=seed)
    train(method, some, recipe, spec=Spec(), views=known)
    held = predict_held_out(
        method, Trials(some, recipe, known, duplicates=copies.subset(chosen.tolist())), FOLDS
    )
    assert held is not None
    features = views.features(None, chosen.tolist()).x
    calibration = fit_calibration(held, [], method.open_classes, FOLDS)
    calibration = with_nearness(calibration, held, [], features, some.labels, method.classes)
    model = Model(method, calibration, reference=Reference.of(features, some.labels))
    mode, calibrator = model.modes[0], model.calibrator
    limit = calibrator.threshold(SHARE, mode)
    rest = views.subset(others)
    logits = model.logits(images.subset(others.tolist()), frozen=rest.inference())[mode]
    scaled = calibrator.calibrate(logits, mode)
    scores = calibrator.score(scaled, calibrator.nearness(rest.features(None, range(len(others))).x), mode)
    low, high = limit.among(len(others))
    return {"refused": float((scores < limit.value).double().mean()), "low": low, "high": high, "far_p": ""}


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
    row = {"draws": len(draws), **{name: round(float(value), 4) for name, value in values.items()}}
    p = torch.tensor([one["far_p"] for one in draws])
    for name, level in (("p_below_5", 0.05), ("p_below_1", 0.01)):
        row[name] = "" if bool(p.isnan().any()) else round(float((p < level).double().mean()), 4)
    return row


if __name__ == "__main__":
    main()
