"""A day of adapting and predicting in one process: does memory, open files or threads grow?

What a day is: a service that adapts every ten minutes and answers once per minute makes 144 adaptations and
1,440 predictions in 24 hours. `python benchmarks/load_loop.py --days 1` makes as many without waiting: mini,
five methods in turn, three to seven classes, run folders written, read back and deleted.
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

import torch
from measure.script import arguments

from dear.clip.factory import load
from dear.data import open_data
from dear.runs.folder import load_run
from dear.runs.model import Model
from dear.tasks.adapt import adapt
from dear.tasks.evaluate import evaluate

METHODS = ("dear", "coop", "clip-adapter", "purify", "maple")


def state() -> tuple[float, int, int]:
    """Resident memory in MiB, open files, threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    return pages * resource.getpagesize() / 2**20, files, threads


def main() -> None:
    options = arguments(__doc__, days=1.0, every=(12, "adaptations between two lines"))
    torch.set_num_threads(1)
    train, test = open_data("world:textures", "train"), open_data("world:textures", "test")
    few = test.subset(range(0, len(test), max(1, len(test) // 10)))
    queries = [few.image(index) for index in range(4)]
    clip = load("mini")
    total, began = round(144 * options.days), time.monotonic()
    seen: list[tuple[float, int, int]] = []
    with tempfile.TemporaryDirectory(prefix="dear-loop-") as work:
        for number in range(1, total + 1):
            part = train.select_classes(train.classes[: 3 + number % 5])
            run = Path(work) / f"run-{number}"
            method = METHODS[number % len(METHODS)]
            adapt(part, run, method=method, backbone=clip, shots=2, seed=number, recipe={"epochs": 1})
            model = load_run(run, clip)
            evaluate(model, few)
            for _ in range(10):
                Model.of(model).answers(queries, top=2)
            shutil.rmtree(run)
            if number % options.every == 0:
                gc.collect()
                seen.append(state())
                memory, files, threads = seen[-1]
                print(
                    f"{number:4} adaptations: {memory:6.1f} MiB, {files} open files, {threads} threads",
                    flush=True,
                )
    first, last = seen[len(seen) // 3], seen[-1]
    print(
        f"{total} adaptations and {10 * total} predictions in {time.monotonic() - began:.0f} s; in the last "
        f"two thirds {last[0] - first[0]:+.1f} MiB, {last[1] - first[1]:+d} files, "
        f"{last[2] - first[2]:+d} threads"
    )


if __name__ == "__main__":
    main()
