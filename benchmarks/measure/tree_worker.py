"""Times a source tree for `against.py`, which runs this file in a process that imports only that tree.

Reads lines from standard input and answers each with a number: `step BATCH CLASSES` and `inference BATCH`
choose the work and run it a few times, `time REPEATS` returns the seconds of one training step or batch.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable

try:
    import instant_clip_tokenizer  # noqa: F401
except ImportError:  # older trees import it; token ids are passed, so nothing is tokenized
    sys.modules["instant_clip_tokenizer"] = types.SimpleNamespace(Tokenizer=object)  # type: ignore[assignment]

import torch
from torch.utils.benchmark import timer

import dear
from dear.runs.model import Model
from measure.task import SpeedTask

WARM_UP = 3


def inference(clip: dear.Clip, batch: int) -> Callable[[], object]:
    """DeAR's answers for a batch of pixels."""
    model, size = Model(SpeedTask(clip, 1, 50).model), clip.config.vision.image_size
    pixels = torch.randn(batch, 3, size, size).to(clip.device)

    def answer() -> None:
        with torch.no_grad():
            model.forward(pixels)

    return answer


def main(device: str, shape: str) -> None:
    clock = time.process_time if device == "cpu" else timer
    torch.manual_seed(0)
    config = dear.load("mini").config if shape == "mini" else dear.ClipConfig.named(shape)
    clip = dear.Clip(config).to(device)
    works: dict[str, tuple[Callable[[], object], int]] = {}
    for line in sys.stdin:
        command, *values = line.split()
        numbers = [int(value) for value in values]
        if command == "step":
            steps = SpeedTask(clip, *numbers).ours()
            works["now"] = steps.run, steps.count
        elif command == "inference":
            works["now"] = inference(clip, *numbers), 1
        run, items = works["now"]
        repeats = numbers[0] if command == "time" else WARM_UP
        began = clock()
        for _ in range(repeats):
            run()
        print((clock() - began) / repeats / items, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
