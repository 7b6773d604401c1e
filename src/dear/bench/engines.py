"""Engines compute the cells of a grid, on this machine or on a Ray cluster, with the same results."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import Any

import msgspec
import torch

from dear.bench.cells import Cell, Environment, Outcome
from dear.bench.plan import PROTOCOLS
from dear.bench.session import Session
from dear.bench.store import CellEngine, Report
from dear.errors import DearError, UsageError
from dear.train.run import Paused
from dear.utils import cluster

#: (cell, environment) -> result, plain JSON
Work = Callable[[dict[str, Any], dict[str, Any]], Mapping[str, Any]]


def compute(cell: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """Compute a cell: plain values in, plain values out, the same on every engine."""
    task, where = msgspec.convert(cell, Cell), Environment(**environment)
    before = torch.get_num_threads()
    torch.set_num_threads(where.threads)  # the order of sums depends on it
    try:
        return PROTOCOLS[task.protocol].run(Session(task, where))
    except Paused:
        raise KeyboardInterrupt from None
    finally:
        torch.set_num_threads(before)


def attempt(work: Work, cell: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """Run `work` and return its result, or its error as data: {"result"} or {"error"}.

    >>> attempt(lambda cell, environment: {"accuracy": 0.5}, {}, {})
    {'result': {'accuracy': 0.5}}
    """
    try:
        return {"result": dict(work(cell, environment))}
    except Exception as error:  # any fault of one cell must leave the others alone
        known = isinstance(error, DearError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        trace = "" if known else traceback.format_exc()
        return {"error": {"type": type(error).__name__, "message": message, "trace": trace}}


def _worker_lost(cell: Cell, how: str) -> Outcome:
    """A cell whose process was lost."""
    return Outcome(cell, error={"type": "WorkerDied", "message": how, "trace": ""})


class Local:
    """This machine: one cell after the other in this process, or in `workers` processes at a time.

    A cell whose process died (killed, out of memory) is tried once more.
    """

    def __init__(self, work: Work, workers: int = 1) -> None:
        if workers < 1:
            raise UsageError(f"workers must be at least 1, got {workers}")
        self.work, self.workers = work, workers

    def run(self, cells: Sequence[Cell], environment: Environment, report: Report) -> None:
        """Compute every cell and report each once."""
        if self.workers == 1:
            for cell in cells:
                report(Outcome(cell, **attempt(self.work, cell.document(), environment.plain())))
            return
        waiting = iter(cells)
        while lost := self._compute(waiting, environment, report, min(self.workers, len(cells) or 1)):
            for cell in lost:  # one of them killed its process; computed alone, it shows which
                self._retry(cell, environment, report)

    def _compute(
        self, waiting: Iterator[Cell], environment: Environment, report: Report, workers: int
    ) -> list[Cell]:
        """Compute cells in order; returns those that were begun and not reported when a process died."""
        running: dict[Future[dict[str, Any]], Cell] = {}
        with _pool(workers) as pool:
            while True:
                with _delay_interrupts():  # the first submission starts the processes
                    for cell in islice(waiting, workers - len(running)):
                        try:
                            future = pool.submit(attempt, self.work, cell.document(), environment.plain())
                        except BrokenProcessPool:  # a process died just now
                            return [*running.values(), cell]
                        running[future] = cell
                if not running:
                    return []
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                finished = [
                    future for future in done if not isinstance(future.exception(), BrokenProcessPool)
                ]
                for future in finished:
                    report(Outcome(running.pop(future), **future.result()))
                if len(finished) < len(done):
                    return list(running.values())

    def _retry(self, cell: Cell, environment: Environment, report: Report) -> None:
        """Compute a cell whose process may have died once more."""
        if self._compute(iter([cell]), environment, report, 1):
            report(_worker_lost(cell, "its process died twice"))


class OnRay:
    """A Ray cluster, or a Ray started on this machine: cells as tasks with CPU and GPU resources.

    A killed worker loses the cell it was computing, which Ray starts again elsewhere. `work` must be
    importable on every node; `address` is that of a running cluster ("auto", "ray://host:10001"), None starts
    one here; a cell may take a part of a GPU.
    """

    def __init__(
        self, work: Work, address: str | None = None, cpus: float = 1, gpus: float = 0, retries: int = 3
    ) -> None:
        cluster.check_installed()
        self.work, self.address = work, address
        self.cpus, self.gpus, self.retries = cpus, gpus, retries

    def run(self, cells: Sequence[Cell], environment: Environment, report: Report) -> None:
        """Compute every cell and report each once."""
        tasks = [(self.work, cell.document(), environment.plain()) for cell in cells]
        with cluster.connection(self.address):
            for number, answer, lost in cluster.run_tasks(attempt, tasks, self.cpus, self.gpus, self.retries):
                cell = cells[number]
                report(_worker_lost(cell, lost) if lost else Outcome(cell, **answer))


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes, which are terminated when this block ends."""
    before = set(mp.active_children())
    spawn = mp.get_context("spawn")  # forks may hang
    pool = ProcessPoolExecutor(workers, spawn, initializer=exit_with_parent)
    try:
        yield pool
    finally:
        ours = [child for child in mp.active_children() if child not in before]
        for child in ours:
            child.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        for child in ours:
            child.join()


@contextmanager
def _delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of this block; processes started in it never receive it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it would let the signal through when a process starts it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_with_parent() -> None:
    """End this process when the one that started it has ended, even if that one was killed."""
    parent = mp.parent_process()

    def watch() -> None:
        assert parent is not None
        parent.join()
        os._exit(1)  # at once; files are written whole or not at all

    if parent is not None:
        threading.Thread(target=watch, name="dear-parent", daemon=True).start()


def make_engine(
    name: str,
    work: Work,
    workers: int | None = None,
    address: str | None = None,
    cpus: float = 1,
    gpus: float | None = None,
) -> CellEngine:
    """An engine by name: "local" with a number of workers, "ray" with an address and a cell's share."""
    if name == "local":
        for option, value in (("address", address), ("gpus", gpus)):
            if value is not None:
                raise UsageError(f"{option} is for the engine ray, got {value!r}", hint="engine")
        return Local(work, 1 if workers is None else workers)
    if name == "ray":
        if workers is not None:
            raise UsageError("workers is for the engine local; the engine ray uses those of its cluster")
        return OnRay(work, address, cpus, gpus or 0)
    raise UsageError(f"engine must be local or ray, got {name!r}")
