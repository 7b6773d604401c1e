"""Whether the labeling page's forecast comes true: accuracy, gain of 50 more labels, and when to stop.

    python research/labels/label_forecast.py --backbone SMALL --root DATA \
        --datasets world:textures,dtd_partial10 --out forecast.csv

Random labels are drawn from the training images and half of the test images, the rest is the pool. The
forecast is compared with the accuracy on test images, before and after 50 more random labels. Datasets are
named as in `unlabeled.py`.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure.script import arguments, names, numbers, record

from dear.unlabeled import UNLABELED, fit_semi_supervised_probe, forecast_gain, learning_curve
from unlabeled import NAMES, OPTIONS, Bench

MORE = 50
PER_CLASS = (2, 4, 8, 16)  # labels


def main() -> None:
    options = arguments(__doc__, **OPTIONS, draws="1,2,3,4,5")
    bench = Bench(options.backbone, Path(options.root), Path(options.files), "", options.device)
    for draw, dataset, labels in itertools.product(
        numbers(options.draws), names(options.datasets), PER_CLASS
    ):
        row = measure(bench, dataset, labels * len(bench.open(dataset)[0].classes), draw)
        record(options.out, [row] if row else [], options.device, machine_last=True)


def measure(bench: Bench, dataset: str, count: int, draw: int) -> dict[str, Any]:
    """One row; empty: there are too few images."""
    (images, test), (features, tests) = bench.open(dataset), bench.features(dataset)
    texts = bench.texts(dataset)
    if count + MORE > len(images):
        return {}
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
    percent = {
        "accuracy": forecast.accuracy,
        "accuracy_low": forecast.accuracy_interval[0],
        "accuracy_high": forecast.accuracy_interval[1],
        "test_accuracy": accuracies[0],
        "gain": float("nan") if forecast.gain is None else forecast.gain,
        "gain_low": low,
        "gain_high": high,
        "test_gain": accuracies[1] - accuracies[0],
    }
    return {
        "dataset": NAMES.get(dataset, dataset),
        "labels": count,
        "draw": draw,
        "held_out": forecast.images,
        **{name: f"{100 * value:.2f}" for name, value in percent.items()},
        "seconds": f"{seconds:.1f}",
    }


if __name__ == "__main__":
    main()
