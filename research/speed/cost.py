"""What the full benchmark costs: steps and images counted exactly, hours from measured rates.

    python research/speed/cost.py --step-ms 20 --class-ms 0.05 --images-per-s 2000

prints the tables of docs/scaling.md for a GPU that trains a step in 20 ms plus 0.05 ms per class and tests
2,000 images per second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from measure.script import add_options, markdown, parser_of

from dear.bench.protocols.few_shot import FewShot
from dear.bench.protocols.transfer import SOURCE, TARGETS, VARIANTS

SIZES = {
    "ImageNet": (1000, 50_000), "Caltech101": (100, 2_465), "OxfordPets": (37, 3_669),
    "StanfordCars": (196, 8_041), "OxfordFlowers": (102, 2_463), "Food101": (101, 30_300),
    "FGVCAircraft": (100, 3_333), "SUN397": (397, 19_850), "DescribableTextures": (47, 1_692),
    "EuroSAT": (10, 8_100), "UCF101": (101, 3_783), "ImageNetV2": (1000, 10_000),
    "ImageNetSketch": (1000, 50_889), "ImageNetA": (200, 7_500), "ImageNetR": (200, 30_000),
}  # fmt: skip
"""Classes and test images of the fifteen datasets."""

ELEVEN = (SOURCE, *TARGETS)
EPOCHS, BATCH = 10, 16


@dataclass(frozen=True)
class Load:
    """The work of one cell: training steps, the classes in each, and test images."""

    protocol: str
    dataset: str
    steps: int
    classes: int
    images: int


@dataclass(frozen=True)
class Rates:
    """Measured speed of one GPU."""

    step_ms: float  #: of a training step without any class
    class_ms: float  #: that each class adds to a step (the text tower)
    images_per_s: float  #: images tested a second
    start_s: float = 5.0  #: to start a cell (load the backbone, decode the shots)

    def seconds(self, load: Load) -> float:
        """Time of a cell."""
        training = load.steps * (self.step_ms + self.class_ms * load.classes) / 1000
        return self.start_s + training + load.images / self.images_per_s


def steps(classes: int, shots: int) -> int:
    """Steps of a few-shot training: whole epochs, the last batch may be smaller.

    >>> steps(1000, 16), steps(500, 16), steps(5, 16)
    (10000, 5000, 50)
    """
    return EPOCHS * math.ceil(classes * shots / BATCH)


def loads() -> list[Load]:
    """The cells of one method and one seed: base-to-novel, few-shot, and both transfers.

    The transfers use the adapter of ImageNet's 16-shot cell, so they only test.

    >>> cells = loads()
    >>> len(cells), sum(cell.steps for cell in cells)
    (68, 53600)
    """
    cells = []
    for name in ELEVEN:
        classes, images = SIZES[name]
        base = (classes + 1) // 2
        cells.append(Load("base-to-novel", name, steps(base, 16), base, images))
    cells += [
        Load("few-shot", name, steps(SIZES[name][0], shots), *SIZES[name])
        for name in ELEVEN
        for shots in FewShot.shots
    ]
    for protocol, targets in (("cross-dataset", TARGETS), ("domain-shift", VARIANTS)):
        tested = sum(SIZES[name][1] for name in (SOURCE, *targets))
        cells.append(Load(protocol, SOURCE, 0, SIZES[SOURCE][0], tested))
    return cells


def makespan(seconds: Sequence[float], gpus: int) -> float:
    """Time until the last cell is done when free GPUs take the longest cell that waits.

    >>> makespan([3, 3, 2, 2, 2], 2)
    7
    """
    ends: list[float] = [0] * gpus
    for length in sorted(seconds, reverse=True):
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def tables(rates: Rates, methods: int, seeds: int, fleets: Sequence[int]) -> str:
    """Two Markdown tables: work and GPU hours by protocol, and days on fleets of GPUs."""
    one = loads()
    times = methods * seeds
    work = []
    for protocol in [*dict.fromkeys(cell.protocol for cell in one), "all"]:
        selected = [cell for cell in one if protocol in ("all", cell.protocol)]
        hours = times * sum(map(rates.seconds, selected)) / 3600
        counts = (len(selected), sum(cell.steps for cell in selected), sum(cell.images for cell in selected))
        work.append((protocol, *(f"{times * count:,}" for count in counts), f"{hours:,.1f}"))
    seconds = [rates.seconds(cell) for cell in one] * times
    waits = []
    for gpus in fleets:
        whole = makespan(seconds, gpus)
        busy = sum(seconds) / (whole * gpus)
        waits.append((gpus, f"{whole / 3600:.2f}", f"{busy:.0%}", f"{max(seconds) / 60:.1f}"))
    first = markdown(("protocol", "cells", "steps", "test images", "GPU hours"), work)
    second = markdown(("GPUs", "hours", "GPUs busy", "longest cell (minutes)"), waits, words=0)
    return f"{first}\n\n{second}\n"


def main() -> None:
    parser = parser_of("GPU hours of the full benchmark from measured rates.")
    parser.add_argument("--step-ms", type=float, required=True, help="milliseconds per step, without classes")
    parser.add_argument("--images-per-s", type=float, required=True, help="images tested a second")
    add_options(parser, class_ms=(0.0, "milliseconds each class adds"), methods=12, seeds=3)
    add_options(parser, start_s=(5.0, "seconds to start a cell"), gpus=[1, 8, 64, 512])
    options = parser.parse_args()
    rates = Rates(options.step_ms, options.class_ms, options.images_per_s, options.start_s)
    print(tables(rates, options.methods, options.seeds, options.gpus))


if __name__ == "__main__":
    main()
