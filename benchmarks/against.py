"""Training step and inference of this source tree compared with those of an older one, in alternating turns.

    mkdir -p build/base && git archive OLDER src benchmarks/measure | tar -x -C build/base
    python benchmarks/against.py --base build/base --device cuda --csv benchmarks/results/against.csv
    OMP_NUM_THREADS=1 python benchmarks/against.py --base build/base --device cpu --shape mini --classes 10 \
        --csv benchmarks/results/against.csv

Each tree runs in its own process with its own `benchmarks/measure`: a random CLIP of a known shape, and DeAR
with the preset `paper`. The trees take turns and medians count; `ratio` is the time of this tree divided by
that of the base. On a CPU the time is that of the processor.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path

from measure.script import DEVICE, arguments, record

HERE = Path(__file__).parents[1]
WORKER = HERE / "benchmarks" / "measure" / "tree_worker.py"


class Tree:
    """A process that measures one source tree."""

    def __init__(self, root: Path, device: str, shape: str) -> None:
        parts = [str(root.resolve() / part) for part in ("src", "benchmarks")]
        path = os.pathsep.join([*parts, os.environ.get("PYTHONPATH", "")])  # which may hold dependencies
        self.process = subprocess.Popen(
            [sys.executable, "-P", WORKER, device, shape],  # -P: `measure` is the tree's, not this script's
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> float:
        """Send a line and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of a source tree ended with status {self.process.wait()}")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def main() -> None:
    options = arguments(
        __doc__,
        base=(Path, "the older source tree"),
        device=DEVICE,
        shape="ViT-B-16",
        batch=([4, 16], "images per training step"),
        classes=[50, 500],
        inference=([1, 16, 256], "images per answered batch"),
        repeats=(5, "runs per turn"),
        turns=9,
        csv=Path,
    )
    trees = [Tree(root, options.device, options.shape) for root in (HERE, options.base)]
    works = [f"step {batch} {classes}" for batch, classes in product(options.batch, options.classes)]
    works += [f"inference {batch}" for batch in options.inference]
    for work in works:
        for tree in trees:
            tree.ask(work)
        seconds: list[list[float]] = [[], []]
        for turn in range(options.turns):
            for at in (0, 1) if turn % 2 else (1, 0):
                seconds[at].append(trees[at].ask(f"time {options.repeats}"))
        ours, base = (statistics.median(times) for times in seconds)
        kind, batch, *classes = work.split()
        row = {"shape": options.shape, "work": kind, "batch": batch, "classes": (classes or ["50"])[0]}
        row |= {"ms": f"{1000 * ours:.3f}", "base_ms": f"{1000 * base:.3f}", "ratio": f"{ours / base:.3f}"}
        record(options.csv, [row], options.device)
    for tree in trees:
        tree.close()


if __name__ == "__main__":
    main()
