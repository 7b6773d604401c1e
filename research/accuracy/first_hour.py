"""A new user's commands: CPU seconds with and without the feature cache, and accuracy with few images.

    python research/accuracy/first_hour.py --backbone mini --images 300
    python research/accuracy/first_hour.py --few --backbone SMALL --skip 10 --csv FILE
        --data DATA/oxford_pets/index.csv          (one line)

Images are made up; --data names yours.

`--few` compares the linear probe, and with --methods DeAR as `dear adapt` trains it, with scikit-learn's
logistic regression with balanced class weights on the same frozen features, C being CLIP's temperature or
chosen by cross-validation: 3 images per class, and unbalanced (of ten classes two with 16, four with 2, four
with 1 image). `--skip` leaves out the first classes, `--steps` sets DeAR's number of steps. Rows are added to
the CSV one by one.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measure.script import arguments, record
from PIL import Image, ImageDraw, ImageFilter


def make_photos(root: Path, classes: int, images: int) -> Path:
    """A folder of class folders with colored shapes, 320 x 240 pixels, as JPEG."""
    rng = random.Random(1)
    for label in range(classes):
        color = tuple(rng.randrange(40, 220) for _ in range(3))
        (root / f"dish {label}").mkdir(parents=True)
        for number in range(images // classes):
            image = Image.effect_noise((320, 240), 60).convert("RGB")
            pen = ImageDraw.Draw(image)
            for _ in range(6):
                x, y, r = rng.randrange(320), rng.randrange(240), rng.randrange(20, 70)
                tone = tuple(max(0, min(255, c + rng.randrange(-40, 40))) for c in color)
                pen.ellipse((x - r, y - r, x + r, y + r), fill=tone)
            image.filter(ImageFilter.GaussianBlur(1)).save(root / f"dish {label}" / f"{number}.jpg")
    return root


def seconds(work: Callable[[], object]) -> float:
    """CPU time of a piece of work."""
    began = time.process_time()
    work()
    return time.process_time() - began


UNBALANCED = (16, 16, 2, 2, 2, 2, 1, 1, 1, 1)  #: images of ten classes


def few(options: argparse.Namespace) -> None:
    """Accuracy with few and with unbalanced images, a row per method, draw and seed."""
    import dear
    from dear.data.open import open_data

    clip = dear.load(options.backbone)
    sets = [open_data(options.data, split) for split in ("train", "test")]
    names = sets[0].classes[options.skip : options.skip + options.classes]
    train, test = (images.select_classes(names) for images in sets)
    for seed in map(int, options.seeds.split(",")):
        for draw, counts in (("3 per class", (3,) * len(names)), ("unbalanced", UNBALANCED)):
            if options.draws and draw not in options.draws:
                continue
            chosen = train.subset(drawn(train.labels.tolist(), counts, seed))
            for method, accuracy, steps, spent in answers(options, clip, chosen, test, seed):
                row = {
                    "backbone": Path(options.backbone).name, "dataset": Path(options.data).parent.name,
                    "first_class": options.skip, "classes": len(names), "draw": draw, "seed": seed,
                    "method": method, "steps": steps, "test_images": len(test),
                    "accuracy": round(accuracy, 4), "seconds": round(spent, 1),
                }  # fmt: skip
                record(options.csv, [row], clip.device)


def drawn(labels: list[int], counts: tuple[int, ...], seed: int) -> list[int]:
    """Places of the first `counts[c]` images of each class in an order that the seed decides."""
    rng = random.Random(seed)
    order = list(range(len(counts)))
    rng.shuffle(order)  # which classes are the rare ones
    rows = []
    for label, count in zip(order, counts, strict=True):
        rows += rng.sample([row for row, other in enumerate(labels) if other == label], count)
    return sorted(rows)


def answers(
    options: argparse.Namespace, clip: Any, train: Any, test: Any, seed: int
) -> Iterator[tuple[str, float, int, float]]:
    """(method, accuracy, steps, seconds) one after another."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression, LogisticRegressionCV

    from dear.runs.feature_cache import FeatureCache
    from dear.tasks.adapt import adapt
    from dear.tasks.evaluate import evaluate

    methods_of_trial = options.methods.split(";")
    features, known = (FeatureCache().image_features(clip, images).double() for images in (train, test))
    features, known = (f / f.norm(dim=-1, keepdim=True) for f in (features, known))
    training_set = features.numpy(), train.labels.numpy()
    if "logistic regression" in methods_of_trial:
        usual = LogisticRegression(C=float(clip.logit_scale), class_weight="balanced", max_iter=1000)
        most = min(3, int(np.bincount(training_set[1]).min()))
        strengths = (10.0, 100.0, 1000.0)
        chosen = LogisticRegressionCV(
            Cs=strengths, cv=max(2, most), class_weight="balanced", max_iter=1000, scoring="neg_log_loss"
        )
        fitted = {"logistic regression, balanced": usual}
        if most > 1:  # else no class could be held out
            fitted["logistic regression, C chosen"] = chosen
        for name, model in fitted.items():
            began = time.perf_counter()
            with warnings.catch_warnings():  # of defaults that will change
                warnings.simplefilter("ignore", FutureWarning)
                model.fit(*training_set)
            right = float((model.predict(known.numpy()) == test.labels.numpy()).mean())
            yield name, right, 0, time.perf_counter() - began
    runs: dict[str, tuple[str, dict[str, Any]]] = {}
    if "probe" in methods_of_trial:
        runs["probe"] = ("linear-probe", {})
    if "dear" in methods_of_trial:
        runs["dear"] = ("dear", {"precision": options.precision})
        if options.steps:
            from dear.methods import find_method

            batch = find_method("dear").recipe["batch"]
            runs["dear"][1]["epochs"] = -(-options.steps // -(-len(train) // batch))
    for name, (method, recipe) in runs.items():
        began = time.perf_counter()
        roles = options.roles if method == "dear" else None
        run = adapt(
            train, backbone=clip, method=method, seed=seed, roles=roles, recipe=recipe, calibrate=False
        )
        spent = time.perf_counter() - began
        evaluation = evaluate(run.method, test)
        yield name, evaluation.accuracy[run.method.pick_mode(None)], run.steps, spent


def main() -> None:
    options = arguments(
        __doc__,
        backbone="mini",
        data=(str, "a folder of class folders; made-up images if left out"),
        classes=10,
        images=480,
        few=(False, "accuracy with few and unbalanced images"),
        roles=(str, "role map of the backbone"),
        skip=(0, "classes of the dataset that are left out first"),
        seeds="1,2,3",
        steps=(int, "of DeAR with 3 per class; as `dear adapt` if left out"),
        draws=(str, "3 per class or unbalanced; both if left out"),
        methods=("logistic regression;probe", "separated by ;"),
        precision="auto",
        csv=(Path, "file to which rows are added"),
    )
    if options.few:
        few(options)
        return
    with tempfile.TemporaryDirectory() as place:
        os.environ["DEAR_CACHE"] = str(Path(place) / "cache")
        import dear
        from dear.tasks.adapt import adapt
        from dear.tasks.evaluate import evaluate
        from dear.tasks.retrieve import retrieve

        data = (
            Path(options.data)
            if options.data
            else make_photos(Path(place) / "photos", options.classes, options.images)
        )
        clip = dear.load(options.backbone)
        seconds_of: dict[str, list[float]] = {}
        accuracy: list[float] = []

        def probe() -> None:
            run = adapt(data, backbone=clip, method="linear-probe")
            accuracy.append(evaluate(run, data).accuracy["default"])

        model = adapt(data, backbone=clip, shots=4, recipe={"epochs": 1}, calibrate=False).method
        query = next(data.rglob("*.jpg"))
        for title, work in (
            ("linear probe, fitted, calibrated and tested", probe),
            ("evaluate, all images", lambda: evaluate(model, data, split="all")),
            (
                "retrieve, all images",
                lambda: retrieve(model, query=query, gallery=data, by="features", attribute="color"),
            ),
        ):
            for limit in ("0", "2000", "2000"):
                os.environ["DEAR_CACHE_MB"] = limit
                seconds_of.setdefault(title, []).append(seconds(work))
    print(f"{options.backbone}, {options.images} images of {options.classes} classes; CPU seconds")
    print("| | without cache | first time | again |\n|---|---:|---:|---:|")
    for title, spent in seconds_of.items():
        print(f"| {title} | {' | '.join(f'{each:.1f}' for each in spent)} |")
    print(f"accuracy of the probe on held-out images: {accuracy[-1]:.1%}")


if __name__ == "__main__":
    main()
