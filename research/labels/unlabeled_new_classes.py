"""Base-to-novel with unlabeled images of the new classes, whose names are known (the setting of PromptKD).

    python research/labels/unlabeled_new_classes.py --backbone SMALL --root DATA \
        --datasets dtd_partial10,world:textures --out new_classes.csv

The first half of the classes has 16 labels each; the second half has names only. "labeled only" learns from
the labels, "with unlabeled" also from all other images of both halves, without labels. Accuracies are those
of test images of the first half among its classes, of the second half among its, their harmonic mean, and of
all test images among all classes. Methods of the product learn from the labels and, with unlabeled images,
from the pseudo-labels that `select_pseudo_labels` keeps of a probe fitted to both.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure.script import arguments, names, numbers, record
from torch import Tensor

from dear.data.images import ListedImages
from dear.runs.spec import Spec
from dear.train.fit import fit
from dear.train.setup.prepare import prepare
from dear.train.setup.roles import roles_for
from dear.unlabeled import UNLABELED, fit_semi_supervised_probe, select_pseudo_labels
from unlabeled import NAMES, OPTIONS, Bench

SHOTS = 16
FIGURES = ("base", "new", "harmonic_mean", "all")


def main() -> None:
    options = arguments(__doc__, **OPTIONS, methods="zero-shot,probe,dear,mmrl", draws="1,2,3")
    bench = Bench(options.backbone, Path(options.root), Path(options.files), "", options.device)
    for draw, dataset, method, unlabeled in itertools.product(
        numbers(options.draws), names(options.datasets), names(options.methods), (False, True)
    ):
        if method == "zero-shot" and unlabeled:
            continue
        began = time.perf_counter()
        figures = measure(bench, dataset, draw, method, unlabeled)
        row: dict[str, Any] = {"dataset": NAMES.get(dataset, dataset), "draw": draw, "method": method}
        row |= {"unlabeled": unlabeled, **dict(zip(FIGURES, figures, strict=True))}
        row["seconds"] = f"{time.perf_counter() - began:.1f}"
        record(options.out, [row], options.device, machine_last=True)


def measure(bench: Bench, dataset: str, draw: int, method: str, unlabeled: bool) -> list[str]:
    """Accuracies in percent: base, new, their harmonic mean, all."""
    (images, test), (features, tests) = bench.open(dataset), bench.features(dataset)
    texts, classes = bench.texts(dataset), len(images.classes)
    base = (classes + 1) // 2
    generator = np.random.default_rng(draw)
    rows = [
        row
        for label in range(base)
        for row in generator.permutation(np.flatnonzero(images.labels.numpy() == label))[:SHOTS].tolist()
    ]
    labels = torch.full_like(images.labels, UNLABELED)
    labels[rows] = images.labels[rows]
    if method == "zero-shot":
        return accuracies((tests - features.mean(dim=0)) @ texts.T, test.labels, base)
    known = torch.ones_like(labels, dtype=torch.bool) if unlabeled else labels != UNLABELED
    teacher = fit_semi_supervised_probe(features[known], labels[known], texts)
    if method == "probe":
        return accuracies(teacher.probe.logits(tests), test.labels, base)
    labeled, clip = images.subset(rows), bench.clip(dataset)
    roles = roles_for(clip, images, None)[0] if method == "dear" else None
    spec = Spec(method=method, seed=draw, calibrate=False, unlabeled_weight=0.0)
    if unlabeled:
        chosen = select_pseudo_labels(teacher.probabilities, labels == UNLABELED)
        pseudo = replace(images.subset(chosen.rows.tolist()), labels=chosen.labels)
        items = (*labeled.items, *pseudo.items)
        both = replace(labeled, items=items, labels=torch.cat([labeled.labels, pseudo.labels]))
        model = fit(prepare(spec, both, drawn=True, clip=clip, roles=roles))
        return accuracies(model.probabilities(test).cpu(), test.labels, base)
    trained = ListedImages(labeled.items, labeled.labels, images.classes[:base], images.template, images.name)
    model = fit(prepare(spec, trained, drawn=True, clip=clip, roles=roles))
    every = model.with_classes(images.classes)
    return accuracies(every.probabilities(test).cpu(), test.labels, base)


def accuracies(scores: Tensor, labels: Tensor, base: int) -> list[str]:
    """What `measure` returns, from scores [n, C]."""
    of_base = labels < base
    first = float((scores[of_base, :base].argmax(dim=1) == labels[of_base]).double().mean())
    second = float((scores[~of_base, base:].argmax(dim=1) + base == labels[~of_base]).double().mean())
    mean = 2 * first * second / max(first + second, 1e-9)
    joint = float((scores.argmax(dim=1) == labels).double().mean())
    return [f"{100 * value:.2f}" for value in (first, second, mean, joint)]


if __name__ == "__main__":
    main()
