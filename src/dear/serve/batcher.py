"""Dynamic batching: images of many requests wait in one queue and are computed together.

The first image of a batch waits at most `longest_wait` for others. One thread computes, so that a device is
never asked for two things at once; whoever waits gets a future.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from dear.serve.errors import Refused

J = TypeVar("J")
R = TypeVar("R")


@dataclass
class _Waiting(Generic[J, R]):
    """An image in the queue."""

    job: J
    future: Future[R] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class Batcher(Generic[J, R]):
    """One queue and one computing thread.

    Args:
        compute: results of a batch of jobs, in their order; an exception fails the whole batch.
        largest: jobs in a batch.
        longest_wait: seconds the first job of a batch waits for others.
        most_queued: jobs waiting at once; more are refused.
        observe: told (jobs in the batch, seconds of the computation) after every batch.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[J]], Sequence[R]],
        largest: int,
        longest_wait: float,
        most_queued: int,
        observe: Callable[[int, float], None] | None = None,
    ) -> None:
        self._compute, self._largest, self._wait, self._most = compute, largest, longest_wait, most_queued
        self._observe = observe
        self._queue: queue.SimpleQueue[_Waiting[J, R] | None] = queue.SimpleQueue()
        self._count = 0
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="dear-serve-compute", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Jobs that wait or are being computed."""
        return self._count

    def submit(self, jobs: Sequence[J]) -> list[Future[R]]:
        """Put all jobs of a request into the queue, or none of them.

        Raises:
            Refused: the queue is full (429) or the service is stopping (503).
        """
        waiting: list[_Waiting[J, R]] = [_Waiting(job) for job in jobs]
        with self._lock:
            if self._closed:
                raise Refused(503, "the service is stopping; ask another one")
            if self._count + len(waiting) > self._most:
                raise Refused(429, f"{self._count} images are waiting; try again", retry_after=1)
            self._count += len(waiting)
            for one in waiting:
                self._queue.put(one)
        return [one.future for one in waiting]

    def close(self) -> None:
        """Answer what is queued, then stop."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            batch, closing = self._collect()
            if batch:
                self._run(batch)
            if closing:
                return

    def _collect(self) -> tuple[list[_Waiting[J, R]], bool]:
        """The next batch, and whether it is the last."""
        first = self._queue.get()
        if first is None:
            return [], True
        batch, until = [first], first.since + self._wait
        while len(batch) < self._largest:
            try:
                left = until - time.monotonic()
                one = self._queue.get(timeout=left) if left > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if one is None:
                return batch, True
            batch.append(one)
        return batch, False

    def _run(self, batch: list[_Waiting[J, R]]) -> None:
        live = [one for one in batch if one.future.set_running_or_notify_cancel()]
        began = time.perf_counter()
        try:
            results: Sequence[Any] = self._compute([one.job for one in live]) if live else []
            for one, result in zip(live, results, strict=True):
                one.future.set_result(result)
        except BaseException as error:
            for one in live:
                if not one.future.done():
                    one.future.set_exception(error)
        finally:
            with self._lock:
                self._count -= len(batch)
        if self._observe is not None:
            self._observe(len(live), time.perf_counter() - began)
