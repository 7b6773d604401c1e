"""Progress callbacks, one type for the whole library."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from html import escape
from typing import Any

Progress = Callable[[str, int, int | None], None]
"""Called with the stage of the work in a word or two, the finished units, and the total where known."""

_SECONDS = 0.2  # between two updates of a bar


def silent(stage: str, done: int, total: int | None) -> None:
    """A progress callback that does nothing."""


def notebook_progress() -> Progress:
    """A progress callback that draws one bar per stage in a Jupyter notebook.

    Example: `dear.adapt("photos", method="proker", progress=dear.notebook_progress())`
    """
    notebook: Any = importlib.import_module("IPython.display")
    bars: dict[str, Any] = {}
    updated: dict[str, float] = {}

    def report(stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if stage in bars and done != total and now - updated[stage] < _SECONDS:
            return
        updated[stage] = now
        value = f' value="{done}" max="{total}"' if total else ""
        count = f"{done:,} of {total:,}" if total else f"{done:,}"
        bar = notebook.HTML(f"{escape(stage)} <progress{value}></progress> {count}")
        if stage in bars:
            bars[stage].update(bar)
        else:
            bars[stage] = notebook.display(bar, display_id=True)

    return report
