"""A cache of small tensors on disk by digest; above its size limit, the least recently used are deleted."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from dear.utils.user_cache import cache_folder

LIMIT_MB = 2000  #: size of the store, unless the variable DEAR_CACHE_MB is set; 0 disables it
_KEYS_PER_QUERY = 500  # SQLite limits the number of values in a query


@dataclass(frozen=True)
class Usage:
    """Size of a store."""

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
        """The stored values by key; missing keys are left out."""
        requested, rows_by_key = list(keys), {}
        if self._broken or not self.path.is_file():
            return {}
        with suppress(sqlite3.Error, OSError), closing(self._open()) as connection, connection:
            for start in range(0, len(requested), _KEYS_PER_QUERY):
                batch = requested[start : start + _KEYS_PER_QUERY]
                marks = ",".join("?" * len(batch))
                rows = connection.execute(f"SELECT key, value FROM entries WHERE key IN ({marks})", batch)
                rows_by_key.update(dict(rows.fetchall()))
                now = int(time.time())
                connection.executemany(
                    "UPDATE entries SET used = ? WHERE key = ?", [(now, key) for key in batch]
                )
        return rows_by_key

    def put(self, entries: Mapping[bytes, bytes]) -> None:
        """Store values; above the limit the least recently used ones are deleted."""
        if self._broken or not entries:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            now = int(time.time())
            with closing(self._open()) as connection, connection:
                connection.executemany(
                    "INSERT OR REPLACE INTO entries VALUES (?, ?, ?)",
                    [(key, value, now) for key, value in entries.items()],
                )
            if self._size() > self.limit:
                self._evict()
        except sqlite3.DatabaseError:  # damaged: deleted, so that the next time it starts empty
            self._broken = True
            self.clear()
        except OSError:
            self._broken = True

    def usage(self) -> Usage:
        """Size and location of the store."""
        count = 0
        with suppress(sqlite3.Error, OSError):
            if self.path.is_file():
                with closing(self._open()) as connection:
                    count = int(connection.execute("SELECT COUNT(*) FROM entries").fetchone()[0])
        return Usage(self.path, count, self._size(), self.limit)

    def clear(self) -> None:
        """Delete all entries."""
        for name in (self.path.name, f"{self.path.name}-wal", f"{self.path.name}-shm"):
            with suppress(OSError):
                self.path.with_name(name).unlink()

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=20)
        connection.execute("PRAGMA auto_vacuum = FULL")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY, value BLOB, used INTEGER)"
        )
        return connection

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def _evict(self) -> None:
        """Delete the least recently used fifth."""
        with closing(self._open()) as connection, connection:
            count = int(connection.execute("SELECT COUNT(*) FROM entries").fetchone()[0])
            connection.execute(
                "DELETE FROM entries WHERE key IN (SELECT key FROM entries ORDER BY used, rowid LIMIT ?)",
                (max(1, count // 5),),
            )
        if self._size() > self.limit and count > 1:
            self._evict()


def _limit() -> int:
    text = os.environ.get("DEAR_CACHE_MB", "")
    return (int(text) if text.isdecimal() else LIMIT_MB) * 1_000_000
