"""Time of things that take turns: medians, so that what else the machine does hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def wait(device: torch.device) -> None:
    """Until the device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """One run: between events on the device where there are any, else by the host's clock."""
    wait(device)
    if device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def medians(
    works: Mapping[str, Callable[[], object]], repeats: int, device: torch.device, warm_up: int = 3
) -> dict[str, float]:
    """Median seconds of each work; they take turns, after some runs that are not counted.

    >>> sorted(medians({"a": lambda: None, "b": lambda: None}, 3, torch.device("cpu")))
    ['a', 'b']
    """
    for work in works.values():
        for _ in range(warm_up):
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work, device))
    return {name: statistics.median(values) for name, values in times.items()}


def peak(work: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes of device memory held while `work` runs; None on a CPU."""
    if device.type != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    wait(device)
    return torch.cuda.max_memory_allocated(device)
