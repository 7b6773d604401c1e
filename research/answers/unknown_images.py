r"""Images of no class: how many known images are refused at 5 %, and how well unknown ones are recognized.

    python research/answers/unknown_images.py --csv research/results/unknown_images.csv
    python research/answers/unknown_images.py --backbone SMALL \
        --tasks DATA/oxford_pets/index.csv,DATA/dtd/index.csv --csv research/results/unknown_images.csv

A method is trained on the first half of the classes, 16 images each. Known images are test images of these
classes, near ones those of the other half, far ones those of the other tasks. Beside the score of the library
stands the largest logit alone. "inside" says whether the refused share of known images lies in the interval
that the calibration states for as many images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from measure.script import arguments, where
from torch import Tensor

import dear
from dear.calibration.calibration import threshold
from dear.calibration.temperature import auroc
from dear.data.images import ImageSet
from dear.runs.feature_cache import FeatureCache
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.tasks.speed import add_rows
from dear.train.fit import fit
from dear.train.setup.prepare import prepare

WORLD = ("textures", "emblems", "vehicles", "fauna", "scenes", "mixed")
SHARE = 0.05
FAR = 300  # images of all other tasks together
MOST = 800  # test images of a task, spread evenly


def main() -> None:
    args = arguments(
        __doc__,
        backbone="mini",
        tasks=",".join(f"world:{name}" for name in WORLD),
        only=(str, "those of the tasks to train on; the others are far"),
        methods="linear-probe,lp-plus-plus,proker,tip-adapter",
        seeds="1,2",
        shots=16,
        csv=(Path, "file to which rows are added"),
    )
    clip = dear.load(args.backbone)
    names = args.tasks.split(",")
    tests = {name: spread(dear.open_data(name, "test")) for name in names}
    features = {name: FeatureCache().image_features(clip, tests[name]) for name in names}
    rows: list[dict[str, Any]] = []
    for name in args.only.split(",") if args.only else names:
        train = dear.open_data(name, "train")
        classes = train.classes[: (len(train.classes) + 1) // 2]
        known = torch.tensor([tests[name].classes[label] in classes for label in tests[name].labels])
        others = [other for other in names if other != name]
        each = FAR // len(others)
        sets: list[tuple[ImageSet, Tensor]] = []
        for keep in (known, ~known):
            places = keep.nonzero()[:, 0]
            sets.append((tests[name].subset(places.tolist()), features[name][places]))
        far = [(other, torch.linspace(0, len(tests[other]) - 1, each).long()) for other in others]
        for method in args.methods.split(","):
            for seed in map(int, args.seeds.split(",")):
                spec = Spec(data=name, method=method, seed=seed, shots=args.shots, classes=classes)
                model = fit(prepare(spec, clip=clip))
                sets_of_scores = [scores(model, images, known_features) for images, known_features in sets]
                apart = [
                    scores(model, tests[o].subset(places.tolist()), features[o][places]) for o, places in far
                ]
                sets_of_scores.append(tuple(torch.cat(parts) for parts in zip(*apart, strict=True)))
                facts = {"backbone": clip.name, "task": tests[name].name, "method": method, "seed": seed}
                rows.append({**facts, **measured(model, *sets_of_scores)})
                print(rows[-1], flush=True)
    if args.csv:
        add_rows(args.csv, [row | where() for row in rows])
    print(f"{sum(row['inside'] for row in rows)} of {len(rows)} inside")


def spread(images: ImageSet) -> ImageSet:
    """At most `MOST` images."""
    return images.subset(range(0, len(images), -(-len(images) // MOST)))


def scores(model: Model, images: ImageSet, features: Tensor) -> tuple[Tensor, Tensor]:
    """The score of each image, and its largest calibrated logit; frozen features [n, E] are known."""
    frozen = (features,) if model.method.cut == "feature" else None
    mode, calibrator = model.modes[0], model.calibrator
    scaled = calibrator.calibrate(model.logits(images, frozen=frozen)[mode], mode)
    return calibrator.score(scaled, calibrator.nearness(features), mode), scaled.amax(dim=-1)


def measured(model: Model, known: Any, near: Any, far: Any) -> dict[str, Any]:
    """Shares and areas of scores and logits."""
    limit = model.calibrator.threshold(SHARE, model.modes[0])
    alone = threshold(model.calibration.modes[model.modes[0]].logits, SHARE) if model.calibration else limit
    low, high = limit.among(len(known[0]))
    refused = float((known[0] < limit.value).double().mean())
    row: dict[str, Any] = {"held_out": limit.images, "known": len(known[0])}
    row |= {"refused": refused, "low": low, "high": high, "inside": low <= refused <= high}
    for name, others in (("near", near), ("far", far)):
        row[f"{name}_auroc"] = auroc(known[0], others[0])
        row[f"{name}_auroc_logit"] = auroc(known[1], others[1])
        row[f"{name}_accepted"] = float((others[0] >= limit.value).double().mean())
        row[f"{name}_accepted_logit"] = float((others[1] >= alone.value).double().mean())
    row["reference_bytes"] = model.reference.size if model.reference else 0
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


if __name__ == "__main__":
    main()
