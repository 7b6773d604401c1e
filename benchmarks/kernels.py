"""Where a step's or an inference's time goes on a GPU, kernel by kernel.

    python benchmarks/kernels.py --batch 16 --classes 50
    python benchmarks/kernels.py --inference 256

Run nothing else in the same process afterwards: once a profiler was attached, launching stays slower. What
the kernels are worth: `mechanisms.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure.script import arguments
from measure.task import SpeedTask
from torch.profiler import ProfilerActivity, profile

import dear


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


def main() -> None:
    about = "images: look at DeAR's inference instead of the step"
    options = arguments(__doc__, batch=16, classes=50, inference=(0, about), rows=40)
    clip = dear.Clip(dear.ClipConfig.named("ViT-B-16")).to("cuda")
    task = SpeedTask(clip, options.batch, options.classes)
    if options.inference:
        pixels = torch.randn(options.inference, 3, 224, 224, device="cuda")
        show(lambda: task.model.all_logits(pixels), options.rows)
    else:
        steps = task.replayed()
        print(f"the time of {steps.count} steps:")
        show(steps.run, options.rows)


if __name__ == "__main__":
    main()
