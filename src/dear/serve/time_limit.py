"""A time limit on a part of a request."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dear.serve.errors import Refused


@contextmanager
def time_limit(seconds: float, refusal: Refused) -> Iterator[None]:
    """Raise a refusal where the block has not ended in time.

    As `asyncio.timeout` does, which Python 3.10 lacks; `anyio.fail_after` takes several times as long. The
    timer can only go off while the task waits inside the block, which the cancellation ends.
    """
    task, late = asyncio.current_task(), False
    assert task is not None

    def give_up() -> None:
        nonlocal late
        late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, give_up)
    try:
        yield
    except asyncio.CancelledError:
        if not late or (sys.version_info >= (3, 11) and task.uncancel()):  # also cancelled by somebody else
            raise
        raise refusal from None
    finally:
        timer.cancel()
