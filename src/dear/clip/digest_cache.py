"""A cache of weight digests in the user's folder: unchanged checkpoint files are not hashed again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dear.clip.identity import WeightDigests
from dear.errors import DearError
from dear.utils import digest
from dear.utils.files import read_json, write_json
from dear.utils.user_cache import cache_folder

_LAYOUT = 1  # increase when the tensors of a file are converted to other names or values
_MAX_ENTRIES = 100


def checkpoint_stamp(path: Path) -> str:
    """Cheap cache key of a checkpoint: name, size, mtime, ctime and inode of each of its files."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    parts = [(name, f.st_size, f.st_mtime_ns, f.st_ctime_ns, f.st_ino) for name, f in stats]
    return digest.of_json([_LAYOUT, os.path.abspath(path), parts]).hex()


def read_digests(stamp: str) -> WeightDigests | None:
    """The cached digests of files with this stamp; None if there are none."""
    entry = _read_cache().get(stamp)
    if isinstance(entry, list) and len(entry) == 2 and all(isinstance(word, str) for word in entry):
        return WeightDigests(*entry)
    return None


def write_digests(stamp: str, digests: WeightDigests) -> None:
    """Store the digests of files in the user's cache."""
    known = {**_read_cache(), stamp: [digests.visual, digests.rest]}
    with suppress(DearError):
        write_json(_cache_file(), dict(list(known.items())[-_MAX_ENTRIES:]))


def _read_cache() -> dict[str, object]:
    try:
        document = read_json(_cache_file(), "list of fingerprints", 1 << 20)
    except DearError:
        return {}
    return document if isinstance(document, dict) else {}


def _cache_file() -> Path:
    return cache_folder() / "fingerprints.json"
