"""Images of requests, decoded by processes that a hostile file can neither occupy nor take down with it.

A decoder may take minutes or gigabytes for a small file. What an image will cost is read from its header
first (`Decoding.cost`) and taken from a budget; the file then goes to a process that has a memory limit and
is killed at a deadline (`dear.serve.decoding.worker`). Callers take turns, and large images never occupy the
last process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dear.serve.decoding.pixels import Cost, Decoding
from dear.serve.decoding.process import MOST_AT_ONCE
from dear.serve.decoding.worker import Worker
from dear.serve.errors import Refused, shutting_down
from dear.serve.turns import FairQueue

_LARGE = 8_000_000  # pixels; such an image never takes the last idle process
_BASE_COST = 100_000  # pixels that the way to a process and back is worth
_MOST_FAILED = 5  # starts of processes in a row, after which waiting files are refused


@dataclass(frozen=True)
class Upload:
    """An image file of a request and what it costs to decode (`Decoding.cost`)."""

    name: str
    content: bytes
    cost: Cost


@dataclass(eq=False)
class Task:
    """An image that waits for a process."""

    upload: Upload
    caller: str
    future: asyncio.Future[Tensor | Refused]
    tries: int = 0

    @property
    def quick(self) -> bool:
        """Whether its decoding surely takes a moment, and no process ended with it."""
        return self.upload.cost.quick and not self.tries


class Decoder:
    """Turns uploads into uint8 [3, S, S], `workers` at once, each in a process. It runs on one event loop."""

    def __init__(self, workers: int, decoding: Decoding) -> None:
        self.decoding, self._budget = decoding, max(decoding.limits.decoding_pixels, decoding.limits.pixels)
        self._most_workers = workers
        self._workers: list[Worker] = []
        self._failed = 0  # starts of processes in a row
        self._queue: FairQueue[Task] = FairQueue()
        self._pixels = 0  # being decoded
        self._closed = False
        self._progress = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it runs on."""
        assert self._loop is not None
        return self._loop

    def start(self) -> None:
        """Start all processes now, on the running event loop; else they start when they are needed."""
        self._bind_loop()
        while len(self._workers) < self._most_workers:
            self._workers.append(Worker(self))

    @property
    def starting(self) -> bool:
        """Whether processes were started and none is ready yet."""
        return bool(self._workers) and not any(worker.ready for worker in self._workers)

    def is_stalled(self, seconds: float) -> bool:
        """Whether files wait and none was finished for that long."""
        waiting = len(self._queue) or any(worker.tasks for worker in self._workers)
        return bool(waiting) and time.monotonic() - self._progress > seconds

    async def decode(self, uploads: Sequence[Upload], caller: str = "") -> list[Tensor | Refused]:
        """All images of a request; in the place of one that cannot be decoded, the reason."""
        costs = [upload.cost for upload in uploads]
        total, most = sum(cost.pixels for cost in costs if cost.known), self.decoding.limits.request_pixels
        if total > most:
            raise Refused(413, f"the images of a request may have {most:,} pixels together, got {total:,}")
        if self._closed:
            raise shutting_down()
        loop = self._bind_loop()
        if not len(self._queue) and not any(worker.tasks for worker in self._workers):
            self._progress = time.monotonic()
        pending: list[Refused | asyncio.Future[Tensor | Refused]] = []
        for upload in uploads:
            if upload.cost.refusal is not None:
                pending.append(_with_name(upload, upload.cost.refusal))
                continue
            task = Task(upload, caller, loop.create_future())
            self._queue.put(caller, upload.cost.pixels + _BASE_COST, task)
            pending.append(task.future)
        self.dispatch()
        try:
            return [one if isinstance(one, Refused) else await one for one in pending]
        finally:
            for one in pending:  # of a request that was given up
                if not isinstance(one, Refused):
                    one.cancel()

    def close(self) -> None:
        """Stop: what waits is refused, what is being decoded is killed. From any thread."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._refuse_all, shutting_down())

    def _refuse_all(self, reason: Refused) -> None:
        for task in self._queue.clear():
            self.finish(task, reason)

    def _bind_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop; processes that another one had are heard on this one."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            for worker in self._workers:
                loop.add_reader(worker.line, worker.receive)
        return loop

    def dispatch(self) -> None:
        """Give waiting files to idle processes; start one more where none is idle."""
        idle = [worker for worker in self._workers if worker.idle]
        for worker in idle:
            if not self._assign(worker, min(MOST_AT_ONCE, max(1, len(self._queue) // self._most_workers))):
                return
        if len(self._queue) and len(self._workers) < self._most_workers and not self._closed:
            self._workers.append(Worker(self))

    def _assign(self, worker: Worker, most: int) -> bool:
        """Have a process decode a file, or several quick ones; whether there was any for it."""
        tasks: list[Task] = []
        length = 0

        def fits_beside(task: Task) -> bool:
            whole = length + len(task.upload.content) <= self.decoding.limits.body_bytes
            return whole and self._fits(task) and task.quick

        while len(tasks) < most and (not tasks or tasks[0].quick):  # none waits for one that takes long
            task = self._queue.take(fits_beside if tasks else self._fits)
            if task is None:
                break
            if not task.future.done():
                self._pixels += task.upload.cost.pixels
                tasks.append(task)
                length += len(task.upload.content)
        if tasks:
            worker.decode(tasks)
        return bool(tasks)

    def _fits(self, task: Task) -> bool:
        """Whether an image may be decoded now: its pixels are there, and it is small or not the last."""
        pixels, busy = task.upload.cost.pixels, sum(bool(worker.tasks) for worker in self._workers)
        last = busy >= self._most_workers - 1 and self._most_workers > 1
        return self._pixels + pixels <= self._budget and not (last and pixels > _LARGE)

    def release(self, task: Task) -> None:
        """A process is done with a file."""
        self._pixels -= task.upload.cost.pixels
        self._progress = time.monotonic()

    def retry(self, task: Task, reason: Refused) -> None:
        """Try a file once more whose process was ended or held up by something else."""
        if task.tries or self._closed:
            self.finish(task, shutting_down() if self._closed else reason)
        else:
            task.tries += 1
            self._queue.put(task.caller, _BASE_COST, task)

    def finish(self, task: Task, answer: Tensor | Refused) -> None:
        """Answer whoever waits for a file."""
        if not task.future.done():
            task.future.set_result(_with_name(task.upload, answer) if isinstance(answer, Refused) else answer)

    def remove(self, worker: Worker, started: bool) -> None:
        """A process is gone; `started`: it was ready before."""
        self._workers.remove(worker)
        self._failed = 0 if started else self._failed + 1
        if self._failed >= _MOST_FAILED:
            self._failed = 0
            self._refuse_all(Refused(503, "images cannot be decoded at present; try again", retry_after=5))
        self.dispatch()


def _with_name(upload: Upload, error: Refused) -> Refused:
    """A refusal with the image's name before it."""
    return Refused(error.http_status, f"{upload.name}: {error}", error.retry_after)
