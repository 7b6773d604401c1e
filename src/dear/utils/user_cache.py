"""The user's cache folder, for results that can be computed again."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """Where things that can be computed again are cached; it may not exist yet.

    The variable `DEAR_CACHE` names it; otherwise it is the system's place for caches (`~/.cache/dear` on
    Linux).
    """
    named = os.environ.get("DEAR_CACHE")
    return Path(named).expanduser() if named else user_cache_path("dear", appauthor=False)
