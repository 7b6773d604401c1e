"""The work of one cell, as engines call it: plain values in, plain values out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dear.bench import base_to_novel, few_shot, held_out, transfer
from dear.bench.cells import Cell, Place
from dear.bench.session import Session
from dear.errors import UsageError
from dear.train import Paused

RUNS: Mapping[str, Callable[[Session], dict[str, Any]]] = {
    "base-to-novel": base_to_novel.run,
    "few-shot": few_shot.run,
    "cross-dataset": transfer.run,
    "domain-shift": transfer.run,
    "leave-one-domain-out": held_out.run,
}
"""How each protocol computes a cell."""


def compute(cell: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """The result of a cell given as plain values; the same on every engine.

    Raises:
        DearError: what the user can mend (missing data, a role map that does not fit).
        KeyboardInterrupt: the user stopped training.
    """
    task, where = Cell(**cell), Place(**place)
    if task.protocol not in RUNS:
        raise UsageError(f"no protocol {task.protocol!r}; choose from {', '.join(RUNS)}")
    before = torch.get_num_threads()
    torch.set_num_threads(where.threads)  # the order of sums depends on it
    try:
        return RUNS[task.protocol](Session(task, where))
    except Paused:
        raise KeyboardInterrupt from None
    finally:
        torch.set_num_threads(before)
