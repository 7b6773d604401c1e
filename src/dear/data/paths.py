"""Paths in tables and lists: `UserPaths` may lead anywhere, `ConfinedPaths` stay inside a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dear.errors import DataError, DearError
from dear.utils.files import read_text

_DRIVE = re.compile(r"[A-Za-z]:")


def read_list(path: Path, what: str, hint: str | None = None) -> str:
    """The text of a table or list, without a byte-order mark; `what` names it in messages."""
    try:
        return read_text(path, what, encoding="utf-8-sig")
    except DearError as error:
        raise DataError(str(error), hint=hint) from error


class UserPaths:
    """Paths in the user's tables: absolute, or relative to a root; links and `..` are allowed."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def check(self, path: str, where: str) -> str:
        """The normalized path; see `ConfinedPaths.check`."""
        normalized = path.strip()
        if not normalized or "\0" in normalized:
            raise DataError(f"{where}: the path {path!r} is empty or malformed")
        absolute = os.path.isabs(normalized) or _DRIVE.match(normalized) is not None
        normalized = normalized if absolute else normalized.replace("\\", "/")
        normalized = os.path.normpath(normalized).replace(os.sep, "/")
        if normalized == "." or normalized.endswith(".."):
            raise DataError(f"{where}: the path {path!r} names a folder, not an image")
        return normalized


class ConfinedPaths:
    """Checks that relative paths stay inside a root after resolving links.

    The root itself may be a link to a dataset elsewhere. Each folder is resolved once.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._real = os.path.realpath(self.root)
        self._folders: dict[str, bool] = {}

    def check(self, path: str, where: str) -> str:
        """The normalized path (`/`, no `.` or inner `..`); it need not exist.

        Args:
            path: as written in the file.
            where: file and row, for messages.
        """
        normalized = path.strip().replace("\\", "/")
        if not normalized or "\0" in normalized:
            raise DataError(f"{where}: the path {path!r} is empty or malformed")
        if normalized.startswith("/") or _DRIVE.match(normalized):
            raise DataError(f"{where}: a path must be relative to {self.root}, got the absolute {path!r}")
        normalized = os.path.normpath(normalized).replace(os.sep, "/")
        if normalized == ".." or normalized.startswith("../"):
            raise DataError(f"{where}: a path must stay inside {self.root}, but {path!r} leaves it")
        folder, name = os.path.split(normalized)
        if folder not in self._folders:
            self._folders[folder] = self._is_inside(folder)
        full = os.path.join(self._real, normalized)
        if not self._folders[folder] or (os.path.islink(full) and not self._is_inside(normalized)):
            raise DataError(f"{where}: a path must stay inside {self.root}, but {path!r} leaves it by a link")
        if not name or normalized == ".":
            raise DataError(f"{where}: the path {path!r} names a folder, not an image")
        return normalized

    def _is_inside(self, relative: str) -> bool:
        real = os.path.realpath(os.path.join(self._real, relative))
        return real == self._real or real.startswith(self._real.rstrip(os.sep) + os.sep)
