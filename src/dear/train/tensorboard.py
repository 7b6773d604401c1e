"""TensorBoard: the lines of a training's log, and the results of a grid's cells, as scalars."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dear.train.loop import OnStep
from dear.utils.extras import missing_extra

_SKIPPED = ("step", "epoch")


class Board:
    """Writes scalars to a folder that `tensorboard --logdir` shows."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise missing_extra("logging for TensorBoard", "tensorboard") from None
        self.folder = Path(folder)
        self._make = SummaryWriter
        self._writers: dict[str, Any] = {}
        self._last = 0

    def writer(self, name: str = "") -> Any:
        """The writer of one curve's folder."""
        if name not in self._writers:
            self._writers[name] = self._make(str(self.folder / name) if name else str(self.folder))
        return self._writers[name]

    def line(self, step: int, steps: int, line: Mapping[str, float | int]) -> None:
        """Write a line of the training log; called after every step, each line counts once."""
        at = int(line.get("step", 0))
        if at <= self._last:
            return
        self._last = at
        for name, value in line.items():
            if name not in _SKIPPED:
                self.writer().add_scalar(f"train/{name}", value, at)

    def result(
        self, run: str, group: str, step: int, modes: Mapping[str, Mapping[str, float | None]]
    ) -> None:
        """Write accuracies by mode and column: a curve for `run` (a method), one chart per column and mode.

        `group` says what was measured on (protocol and dataset), `step` is the place on the axis (the seed).
        """
        for mode, row in modes.items():
            for column, value in row.items():
                if value is not None:
                    words = [group, column] + ([] if mode == "default" else [mode])
                    self.writer(_plain(run)).add_scalar("/".join(map(_plain, words)), value, step)

    def close(self) -> None:
        """Write what is waiting and close the files."""
        for writer in self._writers.values():
            writer.close()


@contextmanager
def logged(folder: str | os.PathLike[str] | None, progress: OnStep | None = None) -> Iterator[OnStep]:
    """A training's step callback that also writes to TensorBoard; without a folder just the callback."""
    if folder is None:
        yield progress or (lambda step, steps, line: None)
        return
    board = Board(folder)

    def both(step: int, steps: int, line: Mapping[str, float | int]) -> None:
        board.line(step, steps, line)
        if progress is not None:
            progress(step, steps, line)

    try:
        yield both
    finally:
        board.close()


def _plain(words: str) -> str:
    """A name that is safe as a folder and as a tag.

    >>> _plain("world:textures"), _plain("../x")
    ('world-textures', 'x')
    """
    return re.sub(r"[^A-Za-z0-9_.]+", "-", words).strip("-.") or "unnamed"
