"""Where a step's or an inference's time goes on a GPU, kernel by kernel.

    python benchmarks/kernels.py --batch 16 --classes 50
    python benchmarks/kernels.py --inference 256
    python benchmarks/kernels.py --compare --batch 16 --classes 50

With `--compare` DeAR's recorded step is timed with the Triton kernels, with `torch.compile` of
`Block.forward` and with plain PyTorch (the table in docs/performance.md). Otherwise run nothing else in the
same process afterwards: once a profiler was attached, launching stays slower.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

import torch
from measure.clock import medians
from measure.script import arguments
from measure.task import SpeedTask
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import dear
from dear.clip.tower import Block

FORWARD = Block.forward
WAYS = ("Triton kernels", "torch.compile", "plain")


def show(work: Callable[[], object], rows: int) -> None:
    """Run once under the profiler and print the kernels that took longest."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    found = sorted(seen.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in found)
    print(f"{total:.0f} us in {sum(event.count for event in found)} kernels")
    for event in found[:rows]:
        each = event.device_time_total / event.count
        print(f"{event.device_time_total:9.0f} us {event.count:6d} x {each:7.1f}  {event.key[:90]}")


@cache
def compiled_forward() -> Callable[..., Tensor]:
    """`Block.forward` by torch.compile."""
    return torch.compile(FORWARD)


@contextmanager
def towers_by(way: str) -> Iterator[None]:
    """Within this block layers run in one of `WAYS`."""
    kernels = "1" if way == WAYS[0] else "0"
    forward = FORWARD if way != WAYS[1] else compiled_forward()
    with mock.patch.dict(os.environ, DEAR_KERNELS=kernels), mock.patch.object(Block, "forward", forward):
        yield


def compare(task: SpeedTask, repeats: int) -> None:
    """Print milliseconds per recorded step of each way; they take turns."""
    works: dict[str, Callable[[], object]] = {}
    for way in WAYS:
        with towers_by(way):
            steps = task.replayed()

        def run(way: str = way, work: Callable[[], object] = steps.run) -> None:
            with towers_by(way):  # the frozen part of the steps is not recorded
                work()

        works[way] = run
    for way, seconds in medians(works, repeats).items():
        print(f"{way}: {1000 * seconds / steps.count:.2f} ms per step")


def main() -> None:
    about = "images: look at DeAR's inference instead of the step"
    options = arguments(
        __doc__, batch=16, classes=50, inference=(0, about), rows=40, compare=False, repeats=20
    )
    clip = dear.Clip(dear.ClipConfig.named("ViT-B-16")).to("cuda")
    task = SpeedTask(clip, options.batch, options.classes)
    if options.compare:
        return compare(task, options.repeats)
    if options.inference:
        pixels = torch.randn(options.inference, 3, 224, 224, device="cuda")
        show(lambda: task.model.all_logits(pixels), options.rows)
    else:
        steps = task.replayed()
        print(f"the time of {steps.count} steps:")
        show(steps.run, options.rows)
    return None


if __name__ == "__main__":
    main()
