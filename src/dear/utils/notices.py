"""Notes to the user that do not stop the work: written to the logger "dear", each sentence once."""

from __future__ import annotations

import logging
from functools import lru_cache

_log = logging.getLogger("dear")


@lru_cache(maxsize=1024)
def note(sentence: str) -> None:
    """Say something worth knowing (level INFO): shown by the command line, silent in a Python program."""
    _log.info("note: %s", sentence)


@lru_cache(maxsize=1024)
def warn(sentence: str) -> None:
    """Say something that is probably not meant (level WARNING): on standard error unless turned off."""
    _log.warning("dear: %s", sentence)
