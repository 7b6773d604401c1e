r"""Calibration error of trained classes, compared with the error that a perfectly calibrated model shows.

    python research/answers/calibration.py run --keep kept --tasks world:textures,world:scenes --shots 4,16
    python research/answers/calibration.py run --keep kept --backbone SMALL --shots 4,16 \
        --tasks DATA/dtd_partial10/index.csv,DATA/eurosat/index.csv --classes 25
    python research/answers/calibration.py rows --keep kept --csv research/results/calibration.csv
    python research/answers/calibration.py show --csv research/results/calibration.csv

`run` trains each method with and without the images that its calibration holds out, and keeps the logits of
held-out and of test images; `rows` fits temperatures to the former and measures them on the latter. A perfect
model answers correctly exactly as often as its confidence says: its error is the mean of 200 simulations on
the same confidences. `needed` is the log temperature with the least negative log-likelihood on the test
images. `show` prints a table per method, with the mean of `needed` on the development sets.
"""

from __future__ import annotations

import math
import time
import traceback
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from measure.script import DEVICE, add_options, markdown, names, numbers, parser_of, read
from torch import Tensor

import dear
from dear.calibration.temperature import cautious_temperature, fit_temperature, temperature_error
from dear.data.images import ImageSet
from dear.data.shots import few_shot
from dear.runs.evaluation import calibration_error
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.tasks.speed import add_rows
from dear.train.calibrate import TOWER_CAUTION, TWO_THIRDS_BIAS, calibration_folds
from dear.train.crossval import concat_folds, iter_folds
from dear.train.fit import fit, trials_of
from dear.train.frozen import shared_views
from dear.train.setup.prepare import prepare

TEST = 400  # test images of a task, spread evenly over its classes
DEVELOPMENT = ("caltech101", "dtd_partial10", "world:textures", "world:scenes")
METHODS = names(
    "dear,mmrl,coop,promptsrc,clip-lora,kgcoop,maple,vpt,dear@quick,mmrlpp,tcp,prograd,two-stage,skip-tuning,"
    "dear@paper,rpo,purify,cocoop,"
    "zeroshot,linear-probe,lp-plus-plus,proker,tip-adapter,tip-adapter-f,clip-adapter,prolip"
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("action", choices=("run", "rows", "show"))
    add_options(
        parser,
        backbone="mini",
        classes=(25, "classes of a task at most, the first ones"),
        part=("1/1", "which part of the cells to compute, of how many equal parts"),
        keep=(Path, "folder of logits"),
        csv=Path,
    )
    parser.add_argument("--tasks", type=names, default=["world:textures", "world:scenes"])
    parser.add_argument("--methods", type=names, default=METHODS, help="names, with @ and a preset")
    parser.add_argument("--shots", type=numbers, default=[4, 16])
    parser.add_argument("--seeds", type=numbers, default=[1])
    args = parser.parse_args()
    {"run": run, "rows": write_rows, "show": show}[args.action](args)


def run(args: Any) -> None:
    """Train, and keep the logits of held-out and of test images."""
    clip = dear.load(args.backbone, device=DEVICE)
    args.keep.mkdir(parents=True, exist_ok=True)
    sets = {task: tuple(dear.open_data(task, split) for split in ("train", "test")) for task in args.tasks}
    part, parts = map(int, args.part.split("/"))
    cells = list(product(args.seeds, args.methods, args.shots, args.tasks))
    for seed, cell, shots, task in cells[part - 1 :: parts]:
        whole, test = sets[task]
        classes = whole.classes[: args.classes]
        path = args.keep / f"{whole.name.replace(':', '_')}.{shots}.{cell}.{seed}.pt"
        if path.exists():
            continue
        method, _, preset = cell.partition("@")
        spec = Spec(
            data=task, method=method, preset=preset or None, seed=seed, shots=shots, classes=classes,
            calibrate=False,
        )  # fmt: skip
        facts = {"backbone": clip.name, "task": whole.name, "shots": shots, "method": cell, "seed": seed}
        try:
            kept = {**facts, **answers(spec, clip, whole, some(test.select_classes(classes)))}
        except Exception:  # one cell that fails does not end the grid
            traceback.print_exc()
            continue
        torch.save(kept, path)
        print(path.name, f"{kept['seconds']:.1f} s", flush=True)


def some(images: ImageSet) -> ImageSet:
    """At most `TEST` images, equally many of each class."""
    return few_shot(images, max(1, TEST // len(images.classes)), 1)


def answers(spec: Spec, clip: dear.Clip, whole: ImageSet, test: ImageSet) -> dict[str, Any]:
    """Logits by mode of held-out training images and of test images, with their labels."""
    began = time.perf_counter()
    job = prepare(spec, whole, clip=clip)
    model = fit(job)
    views = shared_views(job.method, job.images, job.recipe)
    folds, parts = calibration_folds(job.method, job.images.labels)
    held = concat_folds(list(islice(iter_folds(model.method, trials_of(job, views), folds), parts)))
    return {
        "quick": job.method.quick,
        "folds": parts,
        "held": on_cpu(held.logits),
        "held_labels": held.labels,
        "test": on_cpu(Model(model.method).logits(test)),
        "test_labels": test.labels,
        "seconds": time.perf_counter() - began,
    }


def on_cpu(logits: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same logits, float32 on the CPU."""
    return {mode: z.float().cpu() for mode, z in logits.items()}


def write_rows(args: Any) -> None:
    """Fit temperatures to the kept logits and add their errors to the CSV file."""
    add_rows(args.csv, [row for path in sorted(args.keep.glob("*.pt")) for row in rows_of(path)])


def rows_of(path: Path) -> list[dict[str, Any]]:
    kept = torch.load(path, weights_only=True)
    facts = {key: kept[key] for key in ("backbone", "task", "shots", "method", "seed", "folds")}
    rows = []
    for mode, held in kept["held"].items():
        labels, truth, logits = kept["held_labels"], kept["test_labels"], kept["test"][mode]
        best = fit_temperature(held, labels)
        chosen = cautious_temperature(
            held, labels, *(() if kept["quick"] else (TWO_THIRDS_BIAS, TOWER_CAUTION))
        )
        scaled = logits / chosen
        row = {
            "mode": mode,
            "held_out": len(labels),
            "test": len(truth),
            "accuracy": float((logits.argmax(dim=-1) == truth).double().mean()),
            "confidence": float(scaled.softmax(dim=-1).amax(dim=-1).mean()),
            "ece_before": ece(logits, truth),
            "ece": ece(scaled, truth),
            "ece_perfect": perfect_ece(scaled),
            "held_log_t": math.log(best),
            "held_error": temperature_error(held, labels, best),
            "log_t": math.log(chosen),
            "needed": math.log(fit_temperature(logits, truth)),
        }
        rows.append({**facts, **{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}})
    return rows


def show(args: Any) -> None:
    """Errors in percent by method and images per class; the log temperature needed on development sets."""
    rows = read(args.csv)
    cells: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in rows:
        cells.setdefault((row["method"], row["mode"], row["shots"]), []).append(row)
    head = (
        "method",
        "mode",
        "images per class",
        "sets",
        "ECE before",
        "ECE",
        "perfect model",
        "needed log T",
    )
    lines = []
    for key, group in cells.items():
        errors = [100 * mean(group, name) for name in ("ece_before", "ece", "ece_perfect")]
        development = [row for row in group if row["task"] in DEVELOPMENT]
        needed = f"{mean(development, 'needed'):.2f}" if development else ""
        lines.append((*key, len({row["task"] for row in group}), *errors, needed))
    print(markdown(head, lines, words=3))


def mean(rows: list[dict[str, str]], name: str) -> float:
    """The mean of a column."""
    return sum(float(row[name]) for row in rows) / len(rows)


def ece(logits: Tensor, labels: Tensor) -> float:
    """Expected calibration error of logits [n, C] and labels [n]."""
    best = logits.softmax(dim=-1).max(dim=-1)
    return calibration_error(best.values, best.indices == labels)


def perfect_ece(logits: Tensor, draws: int = 200) -> float:
    """The mean error of a model that is right exactly as often as its confidence says, on as many images."""
    confidence, generator = logits.softmax(dim=-1).amax(dim=-1), torch.Generator().manual_seed(0)
    errors = [
        calibration_error(confidence, torch.rand(len(confidence), generator=generator) < confidence)
        for _ in range(draws)
    ]
    return sum(errors) / draws


if __name__ == "__main__":
    main()
