"""Continuous batching: a batch starts as soon as the device is free, with what waits for it.

Images of many requests wait in one queue that is fair between callers. One thread computes, so that a device
never computes two batches at once. Other work for the device (class texts, in slices) waits in the same queue
and is computed between two batches.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from dear.serve.errors import Refused, shutting_down
from dear.serve.turns import FairQueue, Pace

TEXT_COST = 0.2  #: of an image: what encoding a text costs at most (mini: 0.1; larger backbones: less)
_CREDIT = 32.0  # images with which a caller that used little goes first
J = TypeVar("J")
R = TypeVar("R")
V = TypeVar("V")


class _Request:
    """Jobs that are answered together, and the event loop that waits for them."""

    def __init__(self, count: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[list[Any]] = self.loop.create_future()
        self._results: list[Any] = [None] * count
        self._missing = count

    def set(self, number: int, result: Any) -> None:
        """Note a result, or the exception in its place."""
        self._results[number] = result
        self._missing -= 1
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        elif not self._missing:
            self.future.set_result(self._results)


class _Waiting(NamedTuple):
    """A job in the queue, or a function that is called by itself."""

    caller: str
    since: float
    request: _Request
    number: int
    job: Any = None
    function: Any = None


@dataclass
class _Started:
    """A batch that the device computes."""

    batch: list[_Waiting]
    live: list[_Waiting]  #: those that somebody still waits for
    since: float
    results: Any = ()  #: or a function that waits for them
    computed: float = 0.0  #: processor seconds so far

    def call(self, function: Callable[[], Any]) -> None:
        """Use what a function returns as results; an exception is the result of every job."""
        began = time.thread_time()
        try:
            self.results = function()
        except BaseException as error:
            self.results = [error] * len(self.live)
        self.computed += time.thread_time() - began


class Batcher(Generic[J, R]):
    """One queue and one computing thread.

    Args:
        compute: results of a batch of jobs, in their order; an exception fails the whole batch. Where the
            device computes by itself, a function that waits for them: the next batch begins before if it
            would be full.
        largest: jobs in a batch; fewer where they take long (`dear.serve.turns`).
        longest_wait: seconds that a job waits for others if it arrives while the device is busy; if the
            device is idle, the job is computed at once.
        most_queued: jobs waiting at once; more are refused, except for callers with few of them.
        most_per_caller: jobs of one caller waiting at once; None: as many as there are places.
        observe: called with (jobs in the batch, seconds of the computation) after every batch.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[J]], Sequence[R] | Callable[[], Sequence[R]]],
        largest: int,
        longest_wait: float,
        most_queued: int,
        most_per_caller: int | None = None,
        observe: Callable[[int, float], None] | None = None,
    ) -> None:
        self._compute, self._largest, self._wait, self._most = compute, largest, longest_wait, most_queued
        self._most_per_caller = most_queued if most_per_caller is None else most_per_caller
        self._observe = observe
        self._pace = Pace()
        self._queue: FairQueue[_Waiting] = FairQueue(_CREDIT)
        self._held: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False
        self._progress = self._free = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="dear-serve-compute", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Jobs that wait or are being computed."""
        return self._held.total()

    def is_stalled(self, seconds: float) -> bool:
        """Whether jobs wait and none was answered for that long."""
        with self._changed:
            return self._held.total() > 0 and time.monotonic() - self._progress > seconds

    async def compute(self, jobs: Sequence[J], caller: str = "") -> list[R]:
        """Results of all jobs of a request, in their order."""
        if not jobs:
            return []
        request, now = _Request(len(jobs)), time.monotonic()
        self._put([_Waiting(caller, now, request, n, job) for n, job in enumerate(jobs)], caller, 1.0)
        return await request.future

    async def call(self, function: Callable[[], V], caller: str = "", cost: float = 1.0) -> V:
        """Call a function in the computing thread when it is the caller's turn."""
        request = _Request(1)
        self._put([_Waiting(caller, time.monotonic(), request, 0, function=function)], caller, cost)
        result: V = (await request.future)[0]
        return result

    def _put(self, waiting: list[_Waiting], caller: str, cost: float) -> None:
        with self._changed:
            if self._closed:
                raise shutting_down()
            total, held = self._held.total(), self._held[caller]
            if total + len(waiting) > self._most and held + len(waiting) > self._share(caller):
                raise Refused(429, f"the queue is full with {total} images; try again", retry_after=1)
            most = self._most_per_caller
            if held + len(waiting) > most:
                reason = f"a key may have {most} images in the queue, got {held + len(waiting)}; try again"
                raise Refused(429, reason, retry_after=1)
            if not total:
                self._progress = time.monotonic()
            self._held[caller] += len(waiting)
            for one in waiting:
                self._queue.put(caller, cost, one)
            self._changed.notify()

    def _share(self, caller: str) -> int:
        """Jobs that a caller may have waiting even where others have filled the queue."""
        return self._most // (2 * len({*self._held, caller}))

    def close(self, seconds: float | None = None) -> None:
        """Answer what is queued, then stop; after `seconds` the rest is refused."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)
        with self._changed:
            unanswered = self._queue.clear()
        _deliver([(one, shutting_down()) for one in unanswered])

    def _work(self) -> None:
        started: _Started | None = None  # the device computes it while the next one is collected
        while True:
            if started is not None and not self._full():
                self._finish(started)
                started = None
            batch = self._collect()
            following = self._begin(batch) if batch and (started is None or _is_job(batch[0])) else None
            if started is not None:
                self._finish(started)
            if not batch:
                return
            started = following or self._begin(batch)
            if not callable(started.results):
                self._finish(started)
                started = None

    def _full(self) -> bool:
        """Whether a whole batch waits."""
        with self._changed:
            return len(self._queue) >= self._pace.pieces(self._largest)

    def _collect(self) -> list[_Waiting]:
        """The next batch; empty when the last one was computed."""
        with self._changed:
            while (first := self._queue.take()) is None:
                if self._closed:
                    return []
                self._changed.wait()
            if not _is_job(first):
                return [first]
            batch, until = [first], first.since + self._wait if first.since < self._free else 0.0
            largest = self._pace.pieces(self._largest)
            while len(batch) < largest:
                one = self._queue.take(_is_job)
                if one is not None:
                    batch.append(one)
                elif self._closed or (remaining := until - time.monotonic()) <= 0 or len(self._queue):
                    break
                else:
                    self._changed.wait(remaining)
            return batch

    def _begin(self, batch: list[_Waiting]) -> _Started:
        """Compute a batch, or have the device begin with it."""
        live = [one for one in batch if not one.request.future.done()]
        started = _Started(batch, live, time.perf_counter())
        if live and not _is_job(live[0]):
            started.call(lambda: [live[0].function()])
        elif live:
            started.call(partial(self._compute, [one.job for one in live]))
        return started

    def _finish(self, started: _Started) -> None:
        """Hand out a batch's results when they are there."""
        if callable(started.results):
            started.call(started.results)
        live, images = started.live, bool(started.live) and _is_job(started.live[0])
        if images:
            self._pace.record(len(live), started.computed)
        _deliver(list(zip(live, started.results, strict=True)))
        with self._changed:
            self._progress = self._free = time.monotonic()
            for one in started.batch:
                self._held[one.caller] -= 1
            self._held = +self._held
        if self._observe is not None and images:
            self._observe(len(live), time.perf_counter() - started.since)


def _deliver(answers: Sequence[tuple[_Waiting, Any]]) -> None:
    """Hand results to the event loops that wait for them, each woken once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Waiting, Any]]] = {}
    for one, result in answers:
        by_loop.setdefault(one.request.loop, []).append((one, result))
    for loop, results in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(_set_all, results)


def _set_all(answers: Sequence[tuple[_Waiting, Any]]) -> None:
    for one, result in answers:
        one.request.set(one.number, result)


def _is_job(waiting: _Waiting) -> bool:
    return waiting.function is None
