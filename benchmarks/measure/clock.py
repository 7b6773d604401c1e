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
    warm_up: int = 3,
    clock: Clock = timer,
    at_least: float = 0.0,
) -> dict[str, float]:
    """Median seconds of each work; they take turns, after some runs that are not counted.

    Args:
        works: what to time, by name.
        repeats: timed runs of each.
        warm_up: runs of each that are not counted.
        clock: in seconds; PyTorch's own waits for the device.
        at_least: go on until this many seconds have passed.

    >>> sorted(medians({"a": lambda: None, "b": lambda: None}, 3))
    ['a', 'b']
    """
    for work in works.values():
        for _ in range(warm_up):
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    began, done = clock(), 0
    while done < repeats or clock() - began < at_least:
        for name, work in works.items():
            times[name].append(seconds(work, clock))
        done += 1
    return {name: statistics.median(values) for name, values in times.items()}


class Laps:
    """Seconds between laps; PyTorch's clock waits for the device before it is read."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.skip()

    def skip(self) -> None:
        """Forget the seconds since the last lap."""
        self._last = timer()

    def lap(self, name: str) -> None:
        """Note the seconds since the last lap."""
        now = timer()
        self.seconds[name], self._last = now - self._last, now


def peak(work: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes of device memory held while `work` runs; None on a CPU."""
    if device.type != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    wait(device)
    return torch.cuda.max_memory_allocated(device)
