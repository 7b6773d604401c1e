"""Answers one can act on, measured: calibration, the common scale, "none of these" and `dear choose`.

    python benchmarks/answers.py run --csv benchmarks/results/answers.csv --seeds 1,2,3
    python benchmarks/answers.py choose --csv benchmarks/results/answers_choose.csv --seeds 1
    python benchmarks/answers.py show benchmarks/results/answers.csv benchmarks/results/answers_choose.csv

`run` trains each method on the first half of the classes (16 images per class), calibrates it on the same
images, and measures on the test images: calibration error (15 bins) of trained, new and all classes before
and after; joint accuracy before and after the common scale; the share of known images refused at 5 % beside
the stated interval; images of the new classes accepted as known. `choose` asks `dear choose` on all classes
and compares its pick with every method's accuracy on the test images. Rows that are in the CSV already are
not computed again; a process that is stopped goes on with the same command.
"""

from __future__ import annotations

import argparse
import csv
import platform
import time
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import dear
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.data.shots import few_shot, halves
from dear.methods.base import Method
from dear.methods.calibration import rejection_score, run_threshold
from dear.train.calibrate import calibrate
from dear.train.confidence import auroc, calibration_error
from dear.train.crossval import Trials, answers_of
from dear.train.feature_cache import frozen_features
from dear.train.run import train
from dear.workflows.choose import METHODS, ChooseOptions, candidate, choose
from dear.workflows.options import AdaptOptions

TASKS = tuple(f"world:{name}" for name in ("textures", "emblems", "vehicles", "scenes", "fauna", "mixed"))
SHOTS = 16


class Features:
    """Frozen image features of a few sets, each computed once."""

    def __init__(self) -> None:
        self.known: dict[str, Tensor] = {}

    def __call__(self, method: Method, images: ImageSet, key: str) -> Tensor | None:
        """Features [n, E] for a method that reads them; None for others."""
        if not method.reads_feature:
            return None
        if key not in self.known:
            self.known[key] = frozen_features(method, images, "auto")
        return self.known[key]


def ece(logits: Tensor, labels: Tensor) -> float:
    best = logits.softmax(dim=-1).max(dim=-1)
    return calibration_error(best.values, best.indices == labels)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(dim=1) == labels).double().mean())


def rows_of(clip: Clip, task: str, name: str, seed: int, known: Features) -> list[dict[str, Any]]:
    """One row per mode of a method."""
    whole, test = open_data(task, "train"), open_data(task, "test")
    base, novel = ([whole.classes[i] for i in half] for half in halves(range(len(whole.classes))))
    images = few_shot(whole.select_classes(base), SHOTS, seed)
    old, new, both = (test.select_classes(names) for names in (base, novel, [*base, *novel]))
    settings = AdaptOptions(backbone=clip, seed=seed)
    method, recipe, preset = candidate(name, images, clip, settings)
    features = known(method, images, f"{task} {seed} train")
    began = time.perf_counter()
    train(method, images, recipe, features=features)
    trained = time.perf_counter()
    method.calibration = calibrate(method, Trials(images, recipe, features))
    calibrated = time.perf_counter()
    assert method.calibration is not None
    inside = answers_of(method, old, features=known(method, old, f"{task} old"))
    outside = answers_of(method, new, features=known(method, new, f"{task} new"))
    on_new = on_both = None
    if method.open_classes:
        on_new, on_both = method.with_classes(novel), method.with_classes([*base, *novel])
        for_new = answers_of(on_new, new, features=known(method, new, f"{task} new"))
        for_both = answers_of(on_both, both, features=known(method, both, f"{task} both"))
    rows = []
    for mode in method.modes:
        own, limit = method.calibration.modes[mode], run_threshold(method, mode)
        scaled = {key: method.calibrated(z[mode], mode) for key, z in (("in", inside), ("out", outside))}
        score, other = (rejection_score(method, scaled[key], mode) for key in ("in", "out"))
        row: dict[str, Any] = {
            "date": date.today().isoformat(),
            "hardware": platform.machine(),
            "backbone": clip.name,
            "dataset": task,
            "seed": seed,
            "method": name,
            "preset": preset or "",
            "mode": mode,
            "temperature": own.temperature,
            "trained_accuracy": accuracy(inside[mode], old.labels),
            "ece_trained_before": ece(inside[mode], old.labels),
            "ece_trained_after": ece(scaled["in"], old.labels),
            "refused": float((score < limit.value).double().mean()),
            "refused_low": limit.low,
            "refused_high": limit.high,
            "false_acceptance": float((other >= limit.value).double().mean()),
            "auroc": auroc(score, other),
            "train_s": round(trained - began, 2),
            "calibrate_s": round(calibrated - trained, 2),
        }
        if on_new is not None and on_both is not None:
            row |= {
                "new_accuracy": accuracy(for_new[mode], new.labels),
                "ece_new_before": ece(for_new[mode], new.labels),
                "ece_new_after": ece(on_new.calibrated(for_new[mode], mode), new.labels),
            }
            for when, z in (("before", for_both[mode]), ("after", on_both.calibrated(for_both[mode], mode))):
                of_old = both.labels < len(base)
                a, b = accuracy(z[of_old], both.labels[of_old]), accuracy(z[~of_old], both.labels[~of_old])
                row |= {
                    f"joint_old_{when}": a,
                    f"joint_new_{when}": b,
                    f"joint_hm_{when}": 2 * a * b / max(a + b, 1e-12),
                    f"ece_all_{when}": ece(z, both.labels),
                }
        rows.append(row)
    return rows


def chosen(
    clip: Clip, task: str, seed: int, minutes: float, methods: tuple[str, ...]
) -> list[dict[str, Any]]:
    """One row per method: its test accuracy on all classes, and whether `dear choose` named it."""
    whole, test, known = open_data(task, "train"), open_data(task, "test"), Features()
    images = few_shot(whole, SHOTS, seed)
    settings = AdaptOptions(backbone=clip, seed=seed)
    found = choose(images, ChooseOptions(methods, minutes=minutes), settings)
    rows = []
    for one in found.candidates:
        method, recipe, _ = candidate(one.method, images, clip, settings)
        train(method, images, recipe, features=known(method, images, "train"))
        answers = answers_of(method, test, features=known(method, test, "test"))[method.modes[0]]
        rows.append(
            {
                "date": date.today().isoformat(),
                "hardware": platform.machine(),
                "backbone": clip.name,
                "dataset": task,
                "seed": seed,
                "method": one.method,
                "cross_validated": None if one.trained is None else float(one.trained.double().mean()),
                "test": accuracy(answers, test.labels),
                "pick": one.method == found.pick.method,
                "choose_s": round(found.seconds, 1),
                "sentence": found.sentence,
            }
        )
    return rows


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to the CSV; columns that are new come last."""
    old = pd.read_csv(path).to_dict("records") if path.exists() else []
    every = [*old, *rows]
    columns = list(dict.fromkeys(key for row in every for key in row))
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        for row in every:
            table.writerow({k: _short(v) for k, v in row.items()})


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return "" if value != value else f"{value:.4f}".rstrip("0").rstrip(".")
    return value


def show(answers: Path, choices: Path | None) -> None:
    """Tables in Markdown, in percent."""
    table = pd.read_csv(answers)
    known = table.groupby(["method", "mode"], sort=False)
    columns = [
        c
        for c in table.columns
        if c.startswith(("ece_", "joint_hm", "trained_acc", "new_acc")) or c == "auroc"
    ]
    means = (100 * known[columns].mean()).round(1)
    means.insert(0, "cells", known.size())
    print(means.to_markdown())
    inside = (table.refused >= table.refused_low) & (table.refused <= table.refused_high)
    under = table.refused <= table.refused_high
    print(
        f"\nrefused within the stated interval: {inside.sum()} of {len(table)} cells ({inside.mean():.0%}); "
        f"not above it: {under.mean():.0%}; mean {table.refused.mean():.1%}"
    )
    if choices is None or not choices.exists():
        return
    runs = pd.read_csv(choices)
    close, regrets = 0, []
    groups = runs.groupby(["dataset", "seed"])
    for _, own in groups:
        regret = own.test.max() - own.test[own["pick"]].iloc[0]
        regrets.append(regret)
        close += regret <= 0.01
    print(
        f"\ndear choose: within one point of the best on the test images in {close} of {len(groups)} cells; "
        f"mean loss {100 * sum(regrets) / len(regrets):.1f} points; "
        f"{groups.choose_s.first().mean():.0f} s on average"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("run", "choose"):
        own = kinds.add_parser(kind)
        own.add_argument("--csv", type=Path, required=True)
        own.add_argument("--tasks", default=",".join(TASKS))
        own.add_argument("--methods", default=",".join(METHODS))
        own.add_argument("--seeds", default="1")
        own.add_argument("--backbone", default="mini")
        own.add_argument("--minutes", type=float, default=3.0)
    own = kinds.add_parser("show")
    own.add_argument("answers", type=Path)
    own.add_argument("choices", type=Path, nargs="?")
    asked = parser.parse_args()
    if asked.kind == "show":
        show(asked.answers, asked.choices)
        return
    torch.set_num_threads(1)
    clip = dear.load(asked.backbone)
    methods = tuple(asked.methods.split(","))
    done = (
        pd.read_csv(asked.csv) if asked.csv.exists() else pd.DataFrame(columns=["dataset", "seed", "method"])
    )
    have = set(zip(done.dataset, done.seed, done.method, strict=True))
    for task in asked.tasks.split(","):
        known = Features()
        for seed in map(int, asked.seeds.split(",")):
            if asked.kind == "choose":
                if not any(h[:2] == (task, seed) for h in have):
                    append(asked.csv, chosen(clip, task, seed, asked.minutes, methods))
                continue
            for name in methods:
                if (task, seed, name) not in have:
                    append(asked.csv, rows_of(clip, task, name, seed, known))
                    print(task, seed, name, flush=True)


if __name__ == "__main__":
    main()
