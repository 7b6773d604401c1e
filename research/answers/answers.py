"""Answers one can act on, measured: calibration, the common scale, "none of these" and `dear choose`.

    python research/answers/answers.py run --keep kept --csv research/results/answers.csv --seeds 1,2,3 \
        --data-root DATA --small BACKBONE --roles roles.json
    python research/answers/answers.py run --keep kept --csv answers.csv --seeds 1,2,3 --device cuda \
        --workers 14 --methods mmrl,dear,coop,clip-lora --data-root DATA --small BACKBONE --roles roles.json
    python research/answers/answers.py rows --keep kept --csv research/results/answers.csv --seeds 1,2,3 \
        --data-root DATA --small BACKBONE --methods mmrl,dear,coop,clip-lora
    python research/answers/answers.py choose --csv research/results/answers_choose.csv --seeds 1,2 \
        --threads 2 --workers 8 --data-root DATA --small BACKBONE --roles roles.json
    python research/answers/answers.py show research/results/answers.csv research/results/answers_choose.csv

`run` trains each method on the first half of the classes (16 images per class), calibrates it on the same
images, and measures on the test images (at most 50 per class): calibration error (15 bins) of trained, new
and all classes before and after, beside the error that a perfectly calibrated model would show on as few
images; joint accuracy before and after the common scale; the share of known images refused at 5 % beside the
stated interval of the true share and that of as many images; images of the new classes accepted as known.
What the models answered stays in `--keep`, so that `rows` makes the table again without any training. Methods
that learn from frozen features share them, without random crops; the others train as `dear adapt` does.
`--workers` processes share the device, and each cell is written when it is done; where SciPy is missing `run`
writes no rows, and `rows` makes them elsewhere.

`choose` asks `dear choose` on the first half of the classes; `show` compares its pick with the test results
of research/results/fair_table.csv on the same classes, images and seeds. `--threads` is the number of cores
that it may use. With `--cpu-clock` the minutes are CPU time, for machines that others use too.

On a machine with a GPU and 16 cores the second command takes the GPU, then the one with `choose` the cores
(2 for each of 8 tables at once, 3 rounds of 2 to 3 minutes); neither needs SciPy, scikit-learn or pandas, and
`kept` and the CSV are all that must be brought back.

Rows that are in the CSV are not computed again; a process that is stopped goes on with the same command.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from answers_rows import append, hardware, rows_of, show
from measure.jobs import workers
from measure.script import add_options, parser_of, read
from torch import Tensor

import dear
import dear.tasks.choose.task
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.data.shots import few_shot, halves
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.tasks.choose.task import METHODS, choose
from dear.train.calibrate import CLASS_FOLDS, FOLDS, SLOW_FOLDS
from dear.train.crossval import (
    Trials,
    iter_folds,
    predict_held_out,
    predict_held_out_classes,
    predict_some_held_out_classes,
)
from dear.train.frozen import shared_views
from dear.train.run import train
from dear.train.setup.prepare import Job, prepare

WORLD = tuple(f"world:{name}" for name in ("textures", "emblems", "vehicles", "scenes", "fauna", "mixed"))
REAL = ("EuroSAT", "DescribableTextures", "OxfordPets", "Caltech101")
CHEAP = "zeroshot,linear-probe,tip-adapter,tip-adapter-f,clip-adapter,lp-plus-plus,proker,prolip"
LARGE = ("Caltech101", "OxfordPets", "world:mixed", "world:emblems")  # their cells are started first


class Task:
    """A dataset in halves of classes: the first is trained, the second is new."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        world = name.startswith("world:")
        self.name, root = name, None if world else options.data_root
        self.clip: Clip = dear.load("mini" if world else options.small, device=options.device)
        self.roles = None if world else options.roles
        self.whole = open_data(name, "train", root=root)
        self.base, self.novel = (
            [self.whole.classes[i] for i in half] for half in halves(range(len(self.whole.classes)))
        )
        test = open_data(name, "test", root=root)
        self.old, self.new = (
            few_shot(test.select_classes(names), options.test_shots, 1) for names in (self.base, self.novel)
        )
        self.options = options
        self.folder = options.keep / name.replace(":", "_") if options.keep else None

    def images(self, seed: int) -> ImageSet:
        """The training images."""
        return few_shot(self.whole.select_classes(self.base), self.options.shots, seed)

    def job(self, name: str, images: ImageSet, seed: int) -> Job:
        """A training of a method, not begun."""
        spec = Spec().changed(method=name, seed=seed, roles=self.roles)
        return prepare(spec, images, drawn=True, clip=self.clip)


def kept(folder: Path, task: str, seed: int, method: str) -> Path:
    """The file of what a method answered."""
    return folder / task.replace(":", "_") / f"{method}.{seed}.answers.pt"


def save(value: Any, file: Path) -> None:
    """A file that other processes never see half written."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    torch.save(value, part)
    part.replace(file)


def answered(task: Task, name: str, seed: int) -> dict[str, Any]:
    """Train a method, and everything that its calibration needs; kept in a file."""
    assert task.folder is not None
    file = kept(task.options.keep, task.name, seed, name)
    if file.exists():
        known: dict[str, Any] = torch.load(file, weights_only=False)
        return known
    images = task.images(seed)
    job = task.job(name, images, seed)
    method, recipe, preset = job.method, job.recipe, job.spec.preset
    if method.quick:  # what it learns from is computed in one pass over the images
        recipe = replace(recipe, augment=False, views=1)
    if task.options.epochs:
        recipe = replace(recipe, epochs=task.options.epochs)
    clock = time.perf_counter if task.clip.device.type == "cuda" else time.process_time
    began = clock()
    views = shared_views(method, images, recipe)
    train(method, images, recipe, views=views if method.quick else None)
    trained = clock()
    trials = Trials(images, recipe, views)
    if method.quick:
        held = predict_held_out(method, trials, FOLDS)
        left = list(predict_held_out_classes(method, trials, CLASS_FOLDS, rotate=True))
    else:
        held, left = (
            next(iter_folds(method, trials, SLOW_FOLDS)),
            [predict_some_held_out_classes(method, trials)],
        )
    stored: dict[str, Any] = {
        "hardware": hardware(task.clip.device.type),
        "torch": torch.__version__,
        "preset": preset or "",
        "held": held,
        "left": left,
        "folds": FOLDS if method.quick else 1,
        "open": method.open_classes,
        "train_s": trained - began,
        "calibrate_s": clock() - trained,
    }

    def logits(classes: list[str], images: ImageSet) -> dict[str, Tensor]:
        return Model(method if classes == task.base else method.with_classes(classes)).logits(images)

    stored["old"] = logits(task.base, task.old), task.old.labels
    stored["outside"] = logits(task.base, task.new)
    if method.open_classes:
        both = [*task.base, *task.novel]
        stored["new"] = logits(task.novel, task.new), task.new.labels
        stored["both"] = [logits(both, images) for images in (task.old, task.new)]
    task.folder.mkdir(parents=True, exist_ok=True)
    save(stored, file)
    return stored


def chosen(task: Task, seed: int, minutes: float, methods: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row per method: what cross-validation found, and whether `dear choose` named it."""
    began = time.process_time()
    result = choose(
        task.images(seed), methods=methods, shots=0, seed=seed, roles=task.roles, minutes=minutes,
        backbone=task.clip,
    )  # fmt: skip
    spent = time.process_time() - began
    later = None if result.pick_for_new is None else result.pick_for_new.method
    return [
        {
            "date": date.today().isoformat(),
            "hardware": hardware("cpu"),
            "torch": torch.__version__,
            "backbone": task.clip.name,
            "dataset": task.name,
            "seed": seed,
            "minutes": minutes,
            "method": one.method,
            "cross_validated": None if one.trained is None else float(one.trained.double().mean()),
            "new": None if one.new is None else float(one.new.double().mean()),
            "skipped": one.skipped or "",
            "pick": one.method == result.pick.method,
            "pick_for_new": one.method == later,
            "choose_cpu_s": round(spent, 1),
            "choose_s": round(result.seconds, 1),
            "sentence": result.sentence,
        }
        for one in result.candidates
    ]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("run", "rows", "choose"):
        subparser = kinds.add_parser(kind)
        subparser.add_argument("--csv", type=Path, required=True)
        subparser.add_argument(
            "--keep", type=Path, required=kind != "choose", help="folder for what models answered"
        )
        add_options(
            subparser,
            tasks=",".join((*WORLD, *REAL)),
            methods=",".join(METHODS) if kind == "choose" else CHEAP,
            seeds="1",
            data_root=(str, "folder of the real datasets in CoOp's layout"),
            small=(str, "backbone for the real datasets"),
            roles=(str, "its role map, for DeAR"),
            device="cpu",
            shots=(16, "training images per class"),
            test_shots=(50, "test images per class"),
            epochs=(int, "fewer than usual, to try the program out"),
            threads=(1, "of choose"),
            workers=(1, "processes"),
            minutes=2.0,
            cpu_clock=False,
        )
    subparser = kinds.add_parser("show")
    subparser.add_argument("answers", type=Path)
    subparser.add_argument("choices", type=Path, nargs="?")
    subparser.add_argument("--fair", type=Path, default=Path("research/results/fair_table.csv"))
    return parser.parse_args()


@functools.cache
def opened(name: str, options: tuple[tuple[str, Any], ...]) -> Task:
    """A task; a process opens each once."""
    return Task(name, argparse.Namespace(**dict(options)))


def cell(name: str, seed: int, method: str, options: tuple[tuple[str, Any], ...]) -> list[dict[str, Any]]:
    """The rows of one method on one dataset; none where SciPy is missing, which they need."""
    torch.set_num_threads(1)
    task = opened(name, options)
    logits = answered(task, method, seed)
    return rows_of(task, method, seed, logits) if importlib.util.find_spec("scipy") else []


def choice(name: str, seed: int, methods: str, options: tuple[tuple[str, Any], ...]) -> list[dict[str, Any]]:
    """The rows of `dear choose` on one dataset."""
    task = opened(name, options)
    torch.set_num_threads(task.options.threads)
    if task.options.cpu_clock:
        dear.tasks.choose.task.time = SimpleNamespace(monotonic=time.process_time)
    return chosen(task, seed, task.options.minutes, tuple(methods.split(",")))


def main() -> None:
    options = arguments()
    if options.kind == "show":
        show(options.answers, options.choices, options.fair)
        return
    methods = options.methods.split(",")
    have = {(row["dataset"], int(row["seed"]), row["method"]) for row in read(options.csv)}
    cells = [
        (name, seed, method)
        for method in methods
        for name in sorted(options.tasks.split(","), key=lambda name: name not in LARGE)  # these take longest
        for seed in map(int, options.seeds.split(","))
        if (name, seed, method) not in have
    ]
    if options.kind == "choose":
        cells = list(dict.fromkeys((name, seed, options.methods) for name, seed, _ in cells))
    elif options.kind == "rows":
        cells = [one for one in cells if kept(options.keep, *one).exists()]
    work, settings = choice if options.kind == "choose" else cell, tuple(vars(options).items())
    with workers(options.workers) as run:
        for number, rows in run(work, [(*one, settings) for one in cells]):
            print(time.strftime("%H:%M:%S"), *cells[number], flush=True)
            append(options.csv, rows)


if __name__ == "__main__":
    main()
