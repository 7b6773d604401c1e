"""A cache of small tensors on disk, addressed by digest; over its size limit the oldest are deleted."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from dear.utils.user_cache import cache_folder

LIMIT_MB = 2000  #: size of the store, unless the variable DEAR_CACHE_MB says otherwise; 0 keeps nothing
_AT_ONCE = 500  # sqlite takes a limited number of values in one question


@dataclass(frozen=True)
class Usage:
    """What a store holds."""

    path: Path
    entries: int
    size: int  #: bytes on disk
    limit: int  #: bytes


class FeatureStore:
    """Bytes by key in one file of the user's cache folder; several processes may use it at once.

    It is a cache: a damaged or unwritable file causes entries to be lost, never an error.

    Args:
        path: the file; None: `features.sqlite` in the cache folder.
        limit: bytes on disk; None: `LIMIT_MB` or the variable DEAR_CACHE_MB.
    """

    def __init__(self, path: Path | None = None, limit: int | None = None) -> None:
        self.path = cache_folder() / "features.sqlite" if path is None else path
        self.limit = _limit() if limit is None else limit
        self._broken = self.limit <= 0

    def get(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """The values of those keys that are there."""
        wanted, rows_by_key = list(keys), {}
        if self._broken or not self.path.is_file():
            return {}
        with suppress(sqlite3.Error, OSError), closing(self._open()) as base, base:
            for start in range(0, len(wanted), _AT_ONCE):
                some = wanted[start : start + _AT_ONCE]
                marks = ",".join("?" * len(some))
                rows = base.execute(f"SELECT key, value FROM entries WHERE key IN ({marks})", some)
                rows_by_key.update(dict(rows.fetchall()))
                now = int(time.time())
                base.executemany("UPDATE entries SET used = ? WHERE key = ?", [(now, key) for key in some])
        return rows_by_key

    def put(self, entries: Mapping[bytes, bytes]) -> None:
        """Keep some values; above the limit the least recently used ones are deleted."""
        if self._broken or not entries:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            now = int(time.time())
            with closing(self._open()) as base, base:
                base.executemany(
                    "INSERT OR REPLACE INTO entries VALUES (?, ?, ?)",
                    [(key, value, now) for key, value in entries.items()],
                )
            if self._size() > self.limit:
                self._forget()
        except sqlite3.DatabaseError:  # damaged: it starts again empty, the next time
            self._broken = True
            self.clear()
        except OSError:
            self._broken = True

    def usage(self) -> Usage:
        """How much is kept, and where."""
        count = 0
        with suppress(sqlite3.Error, OSError):
            if self.path.is_file():
                with closing(self._open()) as base:
                    count = int(base.execute("SELECT COUNT(*) FROM entries").fetchone()[0])
        return Usage(self.path, count, self._size(), self.limit)

    def clear(self) -> None:
        """Forget everything."""
        for name in (self.path.name, f"{self.path.name}-wal", f"{self.path.name}-shm"):
            with suppress(OSError):
                self.path.with_name(name).unlink()

    def _open(self) -> sqlite3.Connection:
        base = sqlite3.connect(self.path, timeout=20)
        base.execute("PRAGMA auto_vacuum = FULL")
        base.execute("CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY, value BLOB, used INTEGER)")
        return base

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def _forget(self) -> None:
        """Remove the oldest fifth."""
        with closing(self._open()) as base, base:
            count = int(base.execute("SELECT COUNT(*) FROM entries").fetchone()[0])
            base.execute(
                "DELETE FROM entries WHERE key IN (SELECT key FROM entries ORDER BY used, rowid LIMIT ?)",
                (max(1, count // 5),),
            )
        if self._size() > self.limit and count > 1:
            self._forget()


def _limit() -> int:
    text = os.environ.get("DEAR_CACHE_MB", "")
    return (int(text) if text.isdecimal() else LIMIT_MB) * 1_000_000
