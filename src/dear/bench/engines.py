"""Engines compute the cells of a grid, on this machine or on a Ray cluster, with the same results."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from dear.bench.cells import Cell, Outcome, Place, Session
from dear.bench.grid import PROTOCOLS, Engine, Report
from dear.errors import DearError, UsageError
from dear.train.run import Paused

Work = Callable[[dict[str, Any], dict[str, Any]], Mapping[str, Any]]  #: (cell, place) -> result, plain JSON


def compute(cell: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """Compute a cell: plain values in, plain values out, the same on every engine.

    Raises:
        DearError: what the user can correct (missing data, a role map that does not fit).
        KeyboardInterrupt: the user stopped training.
    """
    task, where = Cell(**cell), Place(**place)
    before = torch.get_num_threads()
    torch.set_num_threads(where.threads)  # the order of sums depends on it
    try:
        return PROTOCOLS[task.protocol].run(Session(task, where))
    except Paused:
        raise KeyboardInterrupt from None
    finally:
        torch.set_num_threads(before)


def attempt(work: Work, cell: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """Run `work` and return its result, or its error as data: {"result"} or {"error"}.

    >>> attempt(lambda cell, place: {"accuracy": 0.5}, {}, {})
    {'result': {'accuracy': 0.5}}
    """
    try:
        return {"result": dict(work(cell, place))}
    except Exception as error:  # any fault of one cell must leave the others alone
        known = isinstance(error, DearError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        trace = "" if known else traceback.format_exc()
        return {"error": {"type": type(error).__name__, "message": message, "trace": trace}}


def _outcome(cell: Cell, answer: Mapping[str, Any]) -> Outcome:
    return Outcome(cell, answer.get("result"), answer.get("error"))


def _died(cell: Cell, how: str) -> Outcome:
    return Outcome(cell, error={"type": "WorkerDied", "message": how, "trace": ""})


class Local:
    """This machine: one cell after the other in this process, or in several processes at a time.

    Args:
        work: computes one cell.
        workers: processes; 1 computes here.
        retries: how often a cell is tried again whose process died (killed, out of memory).
    """

    def __init__(self, work: Work, workers: int = 1, retries: int = 1) -> None:
        if workers < 1:
            raise UsageError(f"workers = {workers}: at least one is needed")
        self.work, self.workers, self.retries = work, workers, retries

    def run(self, cells: Sequence[Cell], place: Place, report: Report) -> None:
        """Compute every cell and report each once."""
        if self.workers == 1:
            for cell in cells:
                report(_outcome(cell, attempt(self.work, cell.plain(), place.plain())))
            return
        todo = deque((cell, 0) for cell in cells)
        crew = [_Worker(self.work) for _ in range(min(self.workers, len(cells)))]
        try:
            self._drive(crew, todo, place, report)
        finally:
            for worker in crew:
                worker.stop()

    def _drive(
        self, crew: list[_Worker], todo: deque[tuple[Cell, int]], place: Place, report: Report
    ) -> None:
        """Keep every worker busy; a worker that died is replaced and its cell tried again."""
        busy: dict[Connection, tuple[_Worker, Cell, int]] = {}
        while todo or busy:
            for worker in crew:
                if todo and worker.pipe not in busy:
                    cell, tries = todo.popleft()
                    busy[worker.pipe] = (worker, cell, tries)
                    with suppress(OSError):  # it died while it had no work: `wait` then finds its pipe closed
                        worker.pipe.send((cell.plain(), place.plain()))
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                worker, cell, tries = busy.pop(ready)
                try:
                    answer = ready.recv()
                except (EOFError, OSError):
                    code = worker.stop()
                    crew[crew.index(worker)] = _Worker(self.work)
                    if tries < self.retries:
                        todo.append((cell, tries + 1))
                    else:
                        report(_died(cell, f"its process died {tries + 1} times (exit status {code})"))
                else:
                    report(_outcome(cell, answer))


class _Worker:
    """A process that computes the cells it is sent."""

    def __init__(self, work: Work) -> None:
        context = mp.get_context("spawn")  # a forked PyTorch may hang
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        with _interrupts_held():
            self.process.start()
        theirs.close()

    def stop(self) -> int | None:
        """End the process; returns its exit status."""
        self.pipe.close()
        self.process.join(timeout=0.2)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()
        return self.process.exitcode


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until the end; processes started meanwhile do not receive it."""
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


def _serve(pipe: Connection, work: Work) -> None:
    """Compute the cells that come through the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    leave_with_parent()
    while True:
        try:
            cell, place = pipe.recv()
            pipe.send(attempt(work, cell, place))
        except (EOFError, OSError):
            return


def leave_with_parent() -> None:
    """End this process when the one that started it has ended, even if that one was killed."""
    parent = mp.parent_process()

    def watch() -> None:
        assert parent is not None
        parent.join()
        os._exit(1)  # at once; files are written whole or not at all

    if parent is not None:
        threading.Thread(target=watch, name="dear-parent", daemon=True).start()


class OnRay:
    """A Ray cluster, or a Ray started on this machine: cells as tasks with CPU and GPU resources.

    A killed worker loses the cell it was computing, which Ray starts again elsewhere.

    Args:
        work: computes one cell; importable on every node.
        address: of a running cluster ("auto", "ray://host:10001"); None starts one here.
        cpus: CPUs a cell takes.
        gpus: GPUs a cell takes; parts of one are allowed.
        retries: how often a cell is started again whose worker died.

    Raises:
        UsageError: Ray is not installed.
    """

    def __init__(
        self, work: Work, address: str | None = None, cpus: float = 1, gpus: float = 0, retries: int = 3
    ) -> None:
        self.ray = _import_ray()
        self.work, self.address = work, address
        self.cpus, self.gpus, self.retries = cpus, gpus, retries

    def run(self, cells: Sequence[Cell], place: Place, report: Report) -> None:
        """Compute every cell and report each once.

        Raises:
            UsageError: no cluster answers at the address.
        """
        ray = self.ray
        mine = not ray.is_initialized()
        if mine:
            try:
                ray.init(
                    address=self.address,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **({} if self.address else {"include_dashboard": False}),
                )
            except ConnectionError as error:
                raise UsageError(f"{self.address}: no Ray cluster answers ({error})") from None
        try:
            task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=self.retries, max_calls=0)(
                attempt
            )
            pending = {task.remote(self.work, cell.plain(), place.plain()): cell for cell in cells}
            while pending:
                ready, _ = ray.wait(list(pending), num_returns=1)
                for reference in ready:
                    cell = pending.pop(reference)
                    try:
                        answer = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        report(_died(cell, f"its Ray worker was lost: {str(error).splitlines()[0]}"))
                    else:
                        report(_outcome(cell, answer))
        finally:
            if mine:
                ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UsageError(
            "the engine ray needs Ray, which is not installed: pip install '.[cluster]' in your clone"
        ) from None
    return ray


def make_engine(
    name: str,
    work: Work,
    workers: int | None = None,
    address: str | None = None,
    cpus: float = 1,
    gpus: float | None = None,
) -> Engine:
    """An engine by name: "local" or "ray".

    Args:
        name: the engine.
        work: computes one cell.
        workers: processes of the local engine; one by default.
        address: of a Ray cluster.
        cpus: CPU cores per cell on Ray.
        gpus: GPUs per cell on Ray; none by default.

    Raises:
        UsageError: the name is neither, an option belongs to the other engine, or Ray is not installed.
    """
    if name == "local":
        for option, value in (("an address", address), ("a share of GPUs", gpus)):
            if value is not None:
                raise UsageError(f"{option} belongs to the engine ray", hint="engine")
        return Local(work, 1 if workers is None else workers)
    if name == "ray":
        if workers is not None:
            raise UsageError("a number of workers belongs to the engine local; Ray has its own")
        return OnRay(work, address, cpus, gpus or 0)
    raise UsageError(f"no engine is called {name!r}; choose local or ray")
