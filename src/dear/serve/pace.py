"""How much of something is computed at once, so that others do not wait long on a slow machine.

Processor time counts: where other programs have the processors, smaller turns would only cost more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
TURN_SECONDS = 0.2  #: that one turn at the device should take at most
_MEMORY = 0.7  # share of what was known that stays when a turn is seen


class Pace:
    """Learns how long one piece takes. A first turn takes as many as it may, later ones at least `least`.

    >>> pace = Pace()
    >>> pace.pieces(8)
    8
    >>> pace.took(8, 0.8)
    >>> pace.pieces(8)
    2
    """

    def __init__(self, turn_seconds: float = TURN_SECONDS, least: int = 1) -> None:
        self._turn, self._least, self._each = turn_seconds, least, 0.0

    def pieces(self, most: int) -> int:
        """How many pieces to take."""
        return most if self._each * most <= self._turn else max(self._least, int(self._turn / self._each))

    def took(self, pieces: int, seconds: float) -> None:
        """Note how long some pieces took."""
        each = seconds / max(1, pieces)
        self._each = each if not self._each else _MEMORY * self._each + (1 - _MEMORY) * each

    def timed(self, pieces: int, function: Callable[[], T]) -> T:
        """Call a function that computes some pieces, and note how long it computed."""
        began = time.thread_time()
        try:
            return function()
        finally:
            self.took(pieces, time.thread_time() - began)
