"""Whether the labeling page's forecast comes true: accuracy, gain of 50 more labels, and when to stop.

python benchmarks/label_forecast.py --backbone SMALL --datasets world:textures,photos.csv --out forecast.csv

Random labels are drawn from the training images and half of the test images, the rest is the pool. The
forecast is compared with the accuracy on test images, before and after 50 more random labels.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from dear.clip.factory import load
from dear.unlabeled import UNLABELED, fit_semi_supervised_probe, forecast_gain, learning_curve
from unlabeled import Bench

COLUMNS = (
    "dataset",
    "labels",
    "draw",
    "held_out",
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "test_accuracy",
)
COLUMNS += ("gain", "gain_low", "gain_high", "test_gain", "seconds")
MORE = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--datasets", required=True, type=lambda text: text.split(","))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--labels", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "dear-unlabeled")
    parser.add_argument("--part", default="0/1")
    args = parser.parse_args()
    bench = Bench(load(args.backbone, device=args.device), args.files)
    number, parts = (int(one) for one in args.part.split("/"))
    with open(args.out, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for draw in range(args.draws):
            for dataset in args.datasets[number::parts]:
                classes = len(bench.open(dataset)[0].classes)
                for labels in args.labels or [2 * classes, 4 * classes, 8 * classes, 16 * classes]:
                    row = measure(bench, dataset, labels, draw)
                    path = Path(dataset)
                    name = path.parent.name if path.name == "index.csv" else path.name
                    if row:
                        table.writerow([name, labels, draw, *row])
                        file.flush()


def measure(bench: Bench, dataset: str, count: int, draw: int) -> list[object]:
    """One row without the dataset, the number of labels and the draw; empty: there are too few images."""
    (images, test), (features, tests) = bench.open(dataset), bench.features(dataset)
    texts = bench.texts(dataset)
    if count + MORE > len(images):
        return []
    order = torch.from_numpy(np.random.default_rng(draw).permutation(len(images)))
    accuracies = []
    began = time.perf_counter()
    for number in (count, count + MORE):
        labels = torch.full((len(images),), UNLABELED)
        labels[order[:number]] = images.labels[order[:number]]
        if number == count:
            forecast = forecast_gain(learning_curve(features, labels, texts), count, MORE)
            seconds = time.perf_counter() - began
        probe = fit_semi_supervised_probe(features, labels, texts).probe
        accuracies.append(float((probe.logits(tests).argmax(dim=1) == test.labels).double().mean()))
    low, high = forecast.gain_interval or (float("nan"), float("nan"))
    gain = float("nan") if forecast.gain is None else forecast.gain
    figures = (forecast.accuracy, *forecast.accuracy_interval, accuracies[0], gain, low, high)
    rounded = [f"{100 * value:.2f}" for value in (*figures, accuracies[1] - accuracies[0])]
    return [forecast.images, *rounded, f"{seconds:.1f}"]


if __name__ == "__main__":
    main()
