"""Many small measurements in a few processes, each of which keeps what it loaded."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import torch

_RESTARTS = 3  # of all processes, after one of them was killed

Run = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Iterator[tuple[int, Any]]]
"""From a function and the arguments of its calls to (number of the call, result), as results come."""


@contextmanager
def workers(count: int) -> Iterator[Run]:
    """Calls in `count` processes, begun in the order given; with one, in this process.

    A call that fails is reported on standard output and gives no result; the others go on. The processes end
    with this one, also when it is terminated.
    """
    if count < 2:
        yield _here
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what follows `yield` is reached
    pools = [_pool(count)]

    def run(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        left = dict(enumerate(calls))
        while left:
            try:
                futures = {pools[-1].submit(function, *call): number for number, call in left.items()}
                for future in as_completed(futures):
                    number = futures[future]
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        raise error
                    call = left.pop(number)
                    if error is None:
                        yield number, future.result()
                    else:
                        _report(call, error)
            except BrokenProcessPool:
                print(f"a process was killed; {len(left)} calls are left", flush=True)
                if len(pools) > _RESTARTS:
                    raise
                pools.append(_pool(count))

    try:
        yield run
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


def _here(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
    for number, call in enumerate(calls):
        try:
            result = function(*call)
        except Exception as error:  # one figure is missing then, not the others
            _report(call, error)
        else:
            yield number, result


def _pool(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))


def _report(call: tuple[Any, ...], error: BaseException) -> None:
    """One line on what failed, and where."""
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({where[0].filename}:{where[0].lineno})" if where else ""
    named = " ".join(str(part) for part in call if isinstance(part, str | int))
    print(f"failed: {named}: {type(error).__name__}: {error}{place}", flush=True)
