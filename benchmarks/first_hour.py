"""Times of a new user's commands before and after the feature cache: linear probe, evaluate, retrieve.

    python benchmarks/first_hour.py --backbone mini --images 480

"Before" is what the commands did without a cache: the probe trained on random crops through the image tower,
and every command read every image again. Images are made up; give --data for your own.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="mini")
    parser.add_argument("--data", help="a folder of class folders; made-up images if left out")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--images", type=int, default=480)
    asked = parser.parse_args()
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
