"""Share of known test images that `--reject 0.05` refuses, beside the interval that the calibration states.

    python benchmarks/refusals.py --tasks scenes --methods dear --seeds 1 \
        --csv benchmarks/results/refusals.csv

With `--slow` every method is calibrated as slow ones are.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import sys

import torch

import dear
from dear.methods.calibration import confidence_score, threshold
from dear.runs.evaluate import calibration_error
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.train.calibrate import calibrate
from dear.train.fit import fit, trials_of
from dear.train.frozen import shared_views, views_for
from dear.train.prepare import prepare

TASKS = "textures,emblems,vehicles,fauna"


def _sure(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probability of each answer, and whether it is right."""
    best = logits.softmax(dim=-1).max(dim=-1)
    return best.values, best.indices == labels


def main() -> int:
    """Measure and write a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--methods", default="linear-probe,clip-adapter")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--shots", type=int, default=16)
    parser.add_argument("--slow", action="store_true", help="calibrate every method as slow ones are")
    parser.add_argument("--reject", type=float, default=0.05)
    parser.add_argument("--csv", default=None)
    args = parser.parse_args()
    clip, rows = dear.load("mini"), []
    for task in args.tasks.split(","):
        test = dear.open_data(f"world:{task}", "test")
        for name in args.methods.split(","):
            for seed in map(int, args.seeds.split(",")):
                spec = Spec(data=f"world:{task}", method=name, seed=seed, shots=args.shots, calibrate=False)
                job = prepare(spec, clip=clip)
                method = fit(job).method
                views = shared_views(method, job.images, job.recipe)
                found = calibrate(method, trials_of(job, views), quick=False if args.slow else None)
                assert found is not None
                mode = method.modes[0]
                own = found.modes[mode]
                known = views_for(method, test, job.recipe)
                logits = Model(method).logits(test, frozen=None if known is None else known.inference())[mode]
                limit = threshold(own.scores, args.reject)
                scaled = logits / own.temperature
                refused = float((confidence_score(scaled, own.score) < limit.value).double().mean())
                errors = [round(calibration_error(*_sure(z, test.labels)), 4) for z in (logits, scaled)]
                low, high = limit.among(len(test))
                row = {"task": task, "method": name, "seed": seed, "folds": found.folds}
                row |= {"held_out": limit.images, "refused": round(refused, 4)}
                row |= {"low": round(low, 4), "high": round(high, 4), "inside": low <= refused <= high}
                row |= {"temperature": round(own.temperature, 3), "ece_before": errors[0], "ece": errors[1]}
                row |= {"date": datetime.date.today().isoformat(), "machine": platform.machine()}
                rows.append({**row, "torch": torch.__version__, "dear": dear.__version__})
                print(rows[-1], flush=True)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    print(f"{sum(row['inside'] for row in rows)} of {len(rows)} inside")
    return 0


if __name__ == "__main__":
    sys.exit(main())
