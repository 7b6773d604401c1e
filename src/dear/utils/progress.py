"""The type of progress callbacks, one for the whole library."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]
"""Called with the stage of the work in a word or two, the units done, and the units in all where known."""


def silent(stage: str, done: int, total: int | None) -> None:
    """A progress callback that does nothing."""
