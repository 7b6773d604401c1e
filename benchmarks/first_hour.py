"""A new user's commands: their times with and without the feature cache, and accuracy with few images.

    python benchmarks/first_hour.py --backbone mini --images 480
    python benchmarks/first_hour.py --few --backbone SMALL --roles roles.json --skip 10 --csv FILE
        --data DATA/oxford_pets/index.csv          (one line)

"Before" is what the commands did without a cache: the probe trained on random crops through the image tower,
and every command read every image again. Images are made up; give --data for your own.

`--few` compares DeAR as `dear adapt` trains it with the linear probe and with scikit-learn's logistic
regression with balanced class weights on the same frozen features: 3 images per class, and unbalanced (of ten
classes two with 16, four with 2, four with 1 image). `--skip` leaves out the first classes, `--steps` sets
DeAR's number of steps, `--methods` chooses. Rows are added to the CSV one by one.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    """Wall time of a piece of work."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


UNBALANCED = (16, 16, 2, 2, 2, 2, 1, 1, 1, 1)  #: images of ten classes
PROBES: dict[str, dict[str, Any]] = {
    "probe": {"augment": False},
    "probe, 4 views": {"augment": True, "views": 4},
    "probe, random crops": {"augment": True},
}


def few(asked: argparse.Namespace) -> None:
    """Accuracy with few and with unbalanced images, a row per method, draw and seed."""
    import dear
    from dear.data.open import open_data
    from dear.workflows.speed import machine

    clip = dear.load(asked.backbone)
    sets = [open_data(asked.data, split) for split in ("train", "test")]
    names = sets[0].classes[asked.skip : asked.skip + asked.classes]
    train, test = (images.select_classes(names) for images in sets)
    where = machine(clip.device)
    for seed in map(int, asked.seeds.split(",")):
        for draw, counts in (("3 per class", (3,) * len(names)), ("unbalanced", UNBALANCED)):
            if asked.draws and draw not in asked.draws:
                continue
            chosen = train.subset(drawn(train.labels.tolist(), counts, seed))
            for method, accuracy, steps, spent in answers(asked, clip, chosen, test, seed):
                row = {
                    **where, "date": datetime.date.today().isoformat(), "backbone": Path(asked.backbone).name,
                    "dataset": Path(asked.data).parent.name, "first_class": asked.skip, "classes": len(names),
                    "draw": draw, "seed": seed, "method": method, "steps": steps,
                    "test_images": len(test), "accuracy": round(accuracy, 4), "seconds": round(spent, 1),
                }  # fmt: skip
                print(
                    f"{row['dataset']} {draw}, seed {seed}: {method} {accuracy:.1%} ({spent:.0f} s)",
                    flush=True,
                )
                if asked.csv:
                    add_row(Path(asked.csv), row)


def drawn(labels: list[int], counts: tuple[int, ...], seed: int) -> list[int]:
    """Places of the first `counts[c]` images of each class in an order that the seed decides."""
    rng = random.Random(seed)
    order = list(range(len(counts)))
    rng.shuffle(order)  # which classes are the rare ones
    rows = []
    for label, count in zip(order, counts, strict=True):
        rows += rng.sample([row for row, own in enumerate(labels) if own == label], count)
    return sorted(rows)


def answers(
    asked: argparse.Namespace, clip: Any, train: Any, test: Any, seed: int
) -> Iterator[tuple[str, float, int, float]]:
    """(method, accuracy, steps, seconds) one after another."""
    from sklearn.linear_model import LogisticRegression

    from dear.runs.feature_cache import FeatureCache
    from dear.workflows.adapt import adapt
    from dear.workflows.evaluate import evaluate_run

    wanted = asked.methods.split(";")
    features, known = (FeatureCache().image_features(clip, images).double() for images in (train, test))
    features, known = (f / f.norm(dim=-1, keepdim=True) for f in (features, known))
    if "logistic regression" in wanted:
        began = time.perf_counter()
        fitted = LogisticRegression(C=float(clip.logit_scale), class_weight="balanced", max_iter=1000)
        fitted.fit(features.numpy(), train.labels.numpy())
        right = float((fitted.predict(known.numpy()) == test.labels.numpy()).mean())
        yield "logistic regression, balanced", right, 0, time.perf_counter() - began
    runs: dict[str, tuple[str, dict[str, Any]]] = {
        name: ("linear-probe", recipe) for name, recipe in PROBES.items() if name in wanted
    }
    if "dear" in wanted:
        runs["dear"] = ("dear", {"precision": asked.precision})
        if asked.steps:
            from dear.methods import find_method

            batch = find_method("dear").recipe["batch"]
            runs["dear"][1]["epochs"] = -(-asked.steps // -(-len(train) // batch))
    for name, (method, recipe) in runs.items():
        began = time.perf_counter()
        roles = asked.roles if method == "dear" else None
        run = adapt(
            train, backbone=clip, method=method, seed=seed, roles=roles, recipe=recipe, calibrate=False
        )
        spent = time.perf_counter() - began
        found = evaluate_run(run.method, test)
        yield name, found.accuracy[run.method.pick_mode(None)], run.steps, spent


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Add a line to a CSV file, which is made when it is not there."""
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="mini")
    parser.add_argument("--data", help="a folder of class folders; made-up images if left out")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--images", type=int, default=480)
    parser.add_argument("--few", action="store_true", help="accuracy with few and unbalanced images")
    parser.add_argument("--roles", help="role map of the backbone")
    parser.add_argument("--skip", type=int, default=0, help="classes of the dataset that are left out first")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, help="of DeAR with 3 per class; as `dear adapt` if left out")
    parser.add_argument("--draws", help="3 per class or unbalanced; both if left out")
    parser.add_argument("--methods", default="logistic regression;probe;dear", help="separated by ;")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--csv", help="file to which rows are added")
    asked = parser.parse_args()
    if asked.few:
        few(asked)
        return
    with tempfile.TemporaryDirectory() as place:
        os.environ["DEAR_CACHE"] = str(Path(place) / "cache")
        import dear
        from dear.workflows.adapt import adapt
        from dear.workflows.evaluate import evaluate_run
        from dear.workflows.retrieve import retrieve

        data = (
            Path(asked.data)
            if asked.data
            else make_photos(Path(place) / "photos", asked.classes, asked.images)
        )
        clip = dear.load(asked.backbone)
        found: dict[str, tuple[float, float]] = {}
        accuracy = {}

        def probe(augment: bool) -> None:
            recipe = {"augment": augment}
            run = adapt(data, backbone=clip, method="linear-probe", recipe=recipe, calibrate=False)
            accuracy[augment] = evaluate_run(run.method, data).accuracy["default"]

        os.environ["DEAR_CACHE_MB"] = "0"
        slow = seconds(lambda: probe(True))
        os.environ["DEAR_CACHE_MB"] = "2000"
        found["linear probe, first time"] = (slow, seconds(lambda: probe(False)))
        found["linear probe, again"] = (slow, seconds(lambda: probe(False)))
        model = adapt(data, backbone=clip, shots=4, recipe={"epochs": 1}, calibrate=False).method
        query = next(data.rglob("*.jpg"))
        for title, work in (
            ("evaluate, all images", lambda: evaluate_run(model, data, split="all")),
            ("retrieve, all images", lambda: retrieve(model, query, data, attribute="color")),
        ):
            os.environ["DEAR_CACHE_MB"] = "0"
            plain = seconds(work)
            os.environ["DEAR_CACHE_MB"] = "2000"
            found[f"{title}, first time"] = (plain, seconds(work))
            found[f"{title}, again"] = (plain, seconds(work))
    print(f"{asked.backbone}, {asked.images} images of {asked.classes} classes; seconds")
    print("| | before | now |\n|---|---:|---:|")
    for title, (before, now) in found.items():
        print(f"| {title} | {before:.1f} | {now:.1f} |")
    print(f"accuracy of the probe on held-out images: {accuracy[True]:.1%} before, {accuracy[False]:.1%} now")


if __name__ == "__main__":
    main()
