"""The user's cache folder, for results that can be computed again."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """The folder of the user's cache, which may not exist yet.

    It is named by the variable `DEAR_CACHE`; otherwise it is in the system's cache folder (`~/.cache/dear` on
    Linux).
    """
    path = os.environ.get("DEAR_CACHE")
    return Path(path).expanduser() if path else user_cache_path("dear", appauthor=False)
