r"""How often the share of refused images lies in the interval that a threshold states, over many draws.

    python benchmarks/refusal_coverage.py --draws 200 --csv benchmarks/results/refusal_coverage.csv

The images of a task of the attribute world (training and test images together) are encoded once. Each draw
takes k images per class at random, trains a method on them, calibrates it as `dear adapt` does, and refuses
images of the same classes among all others with `reject` = 5 %. A row counts how many draws refused a share
inside the interval stated for as many images, above it and below it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from measure.script import arguments, where

import dear
from dear.calibration.reference import Reference
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


def main() -> None:
    args = arguments(
        __doc__,
        backbone="mini",
        tasks="world:textures,world:scenes",
        methods="zeroshot,linear-probe,proker,tip-adapter,lp-plus-plus",
        shots="2,4,8,16",
        draws=200,
        csv=(Path, "file to which rows are added"),
    )
    clip = dear.load(args.backbone)
    for task in args.tasks.split(","):
        images = JoinedImages.of(*(dear.open_data(task, split) for split in ("train", "test")))
        frozen = build_method("zeroshot", clip, images.classes, template=images.template)
        views = FrozenViews(frozen, images, Recipe(augment=False))  # of all methods: they read features
        for name in args.methods.split(","):
            for shots in map(int, args.shots.split(",")):
                spec = Spec(data=task, method=name, shots=shots)
                options, template = explicit_options(spec), images.template
                method = build_method(name, clip, images.classes, template=template, **options)
                recipe = recipe_for(spec, method, torch.arange(len(images.classes)).repeat(shots))
                draws = [draw(method, images, views, recipe, shots, seed) for seed in range(args.draws)]
                row = {"task": task, "method": name, "shots": shots, **summary(draws)}
                print(row, flush=True)
                if args.csv:
                    add_rows(args.csv, [row | where()])


def draw(
    start: Method, images: ImageSet, views: FrozenViews, recipe: Recipe, shots: int, seed: int
) -> dict[str, float]:
    """The share of refused images of one draw, and the interval stated for it."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    labels = images.labels[order]
    chosen = torch.cat([order[labels == label][:shots] for label in range(len(images.classes))])
    others = order[~torch.isin(order, chosen)]
    some, own = images.subset(chosen.tolist()), views.subset(chosen)
    method = start.untrained(seed=seed)
    train(method, some, recipe, spec=Spec(), views=own)
    held = held_out(method, Trials(some, recipe, own), FOLDS)
    assert held is not None
    features = views.features(None, chosen.tolist())
    found = fit_calibration(held, [], method.open_classes, FOLDS)
    found = with_nearness(found, held, [], features, some.labels, method.classes)
    model = Model(method, found, reference=Reference.of(features, some.labels))
    mode, scale = model.modes[0], model.scale
    limit = scale.threshold(SHARE, mode)
    rest = views.subset(others)
    logits = model.logits(images.subset(others.tolist()), frozen=rest.inference())[mode]
    scaled = scale.calibrated(logits, mode)
    scores = scale.score(scaled, scale.nearness(rest.features(None, range(len(others)))), mode)
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
