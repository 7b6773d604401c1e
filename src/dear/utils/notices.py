"""Notices to the user, written to the logger "dear", each sentence once."""

from __future__ import annotations

import logging
from functools import lru_cache

_log = logging.getLogger("dear")


@lru_cache(maxsize=1024)
def note(sentence: str) -> None:
    """Log a note (level INFO), which the command line shows and a Python program does not."""
    _log.info("notice: %s", sentence)


@lru_cache(maxsize=1024)
def warn(sentence: str) -> None:
    """Log a warning about something that is probably unintended; on standard error unless turned off."""
    _log.warning("notice: %s", sentence)
