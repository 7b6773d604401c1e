"""The user's cache folder, for results that can be computed again."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Where things that can be computed again are kept.

    The variable `DEAR_CACHE` names it; otherwise it is the system's place for caches (`~/.cache/dear` on
    Linux). It may not exist yet.
    """
    named = os.environ.get("DEAR_CACHE")
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "dear" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dear"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dear"
