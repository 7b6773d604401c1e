"""A training on a CPU: seconds and accuracy with new views in every epoch and with a few fixed ones.

    python research/speed/cpu_training.py --backbone SMALL --data DATA/eurosat/index.csv --csv FILE
    OMP_NUM_THREADS=1 python research/speed/cpu_training.py --backbone SMALL \
        --data DATA/dtd_partial10/index.csv \
        --methods dear,mmrl --settings 4:bfloat16 --no-calibrate --csv FILE

0:float32 is new views in every epoch and float32; 4:bfloat16 is what `dear adapt` does where the processor
has it.

The training is that of `dear adapt` with the split's images of the first `--classes` classes; the role map of
the backbone is found before the clock starts. CPU seconds are those of the process, of training and of
calibration; on two free cores the wall time is about half of them.
"""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

from measure.script import arguments, names, record

import dear
from dear.data.open import open_data
from dear.runs.spec import Spec
from dear.train.fit import fit
from dear.train.setup.prepare import prepare


def main() -> None:
    options = arguments(
        __doc__,
        backbone="mini",
        data="world:textures",
        methods=("dear", "with commas"),
        classes=10,
        settings=(["0:float32", "4:bfloat16"], "VIEWS:PRECISION"),
        seeds=[1],
        epochs=(int, "instead of the method's own"),
        test_images=(750, "at most as many, evenly spread"),
        no_calibrate=False,
        csv=Path,
    )
    clip = dear.load(options.backbone, device="cpu")
    train, test = (open_data(options.data, split) for split in ("train", "test"))
    classes = train.classes[: options.classes]
    train, test = train.select_classes(classes), test.select_classes(classes)
    test = test.subset(range(0, len(test), -(-len(test) // options.test_images)))
    for seed, setting, method in product(options.seeds, options.settings, names(options.methods)):
        views, precision = setting.split(":")
        recipe = {"views": int(views), "precision": precision}
        recipe |= {} if options.epochs is None else {"epochs": options.epochs}
        spec = Spec(method=method, recipe=recipe, seed=seed, calibrate=not options.no_calibrate)
        job = prepare(spec, train, clip=clip)
        ends: list[float] = []
        began = time.process_time()

        def step(done: int, steps: int, line: object, ends: list[float] = ends) -> None:
            if done == steps and not ends:
                ends.append(time.process_time())

        model = fit(job, log=step)
        finished = time.process_time()
        accuracy = model.evaluate(test).accuracy
        row = {
            "backbone": Path(options.backbone).name, "dataset": train.name, "method": method,
            "images": len(train), "classes": len(classes), "test_images": len(test), "steps": job.steps,
            "seed": seed, "views": views, "precision": precision,
            "training_cpu_s": round(ends[0] - began, 1), "calibration_cpu_s": round(finished - ends[0], 1),
            **{
                f"accuracy_{mode}": round(accuracy[mode], 4)
                for mode in ("fused", "decoupled") if mode in accuracy
            },
        }  # fmt: skip
        record(options.csv, [row])


if __name__ == "__main__":
    main()
