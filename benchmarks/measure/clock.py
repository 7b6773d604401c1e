"""Time of things that take turns: medians, so that what else the machine does hits all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
from torch.utils.benchmark import timer

Clock = Callable[[], float]


def wait(device: torch.device) -> None:
    """Until the device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], clock: Clock = timer) -> float:
    """One run; PyTorch's own clock waits for the device before it is read."""
    began = clock()
    work()
    return float(clock() - began)


def medians(
    works: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    warm_up: int = 3,
    clock: Clock = timer,
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
            times[name].append(seconds(work, clock))
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
