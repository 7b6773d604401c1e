"""A training on a CPU: seconds and accuracy with new views in every epoch and with a few fixed ones.

    python benchmarks/cpu_training.py --backbone SMALL --data DATA/eurosat/index.csv --csv FILE

0:float32 is new views in every epoch and float32; 4:bfloat16 is what `dear adapt` does where the processor
has it.

The training is that of `dear adapt` with the split's images of the first `--classes` classes; the role map of
the backbone is found before the clock starts. CPU seconds are those of the process, of training and of
calibration; on two free cores the wall time is about half of them.
"""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path

import torch

import dear
from dear.data.open import open_data
from dear.runs.spec import Spec
from dear.train.fit import fit
from dear.train.prepare import prepare
from dear.workflows.speed import add_rows, machine


def main() -> None:
    """Train with each number of views and seed; print each row, and add it to a CSV file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="mini")
    parser.add_argument("--data", default="world:textures")
    parser.add_argument("--method", default="dear")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--settings", nargs="+", default=["0:float32", "4:bfloat16"], help="VIEWS:PRECISION")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--epochs", type=int, help="None: the method's own")
    parser.add_argument("--test-images", type=int, default=750, help="at most so many, evenly spread")
    parser.add_argument("--no-calibrate", action="store_true")
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    clip = dear.load(options.backbone, device="cpu")
    train, test = (open_data(options.data, split) for split in ("train", "test"))
    names = train.classes[: options.classes]
    train, test = train.select_classes(names), test.select_classes(names)
    test = test.subset(range(0, len(test), -(-len(test) // options.test_images)))
    for seed in options.seeds:
        for setting in options.settings:
            views, precision = setting.split(":")
            recipe = {"views": int(views), "precision": precision}
            recipe |= {} if options.epochs is None else {"epochs": options.epochs}
            spec = Spec(method=options.method, recipe=recipe, seed=seed, calibrate=not options.no_calibrate)
            job = prepare(spec, train, clip=clip)
            ends: list[float] = []
            began = time.process_time()

            def step(done: int, steps: int, line: object, ends: list[float] = ends) -> None:
                if done == steps and not ends:
                    ends.append(time.process_time())

            model = fit(job, log=step)
            finished = time.process_time()
            evaluated = model.evaluate(test)
            row = {
                **machine(clip.device), "date": datetime.date.today().isoformat(),
                "backbone": Path(options.backbone).name, "dataset": train.name, "method": options.method,
                "images": len(train), "classes": len(names), "test_images": len(test), "steps": job.steps,
                "seed": seed,
                "views": views, "precision": precision, "threads": torch.get_num_threads(),
                "training_cpu_s": round(ends[0] - began, 1),
                "calibration_cpu_s": round(finished - ends[0], 1),
                **{f"accuracy_{mode}": round(value, 4) for mode, value in evaluated.accuracy.items()},
            }  # fmt: skip
            print(row, flush=True)
            if options.csv:
                add_rows(options.csv, [row])


if __name__ == "__main__":
    main()
