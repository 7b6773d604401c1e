"""Paths in tables and lists: `Anywhere` for tables of the user, `Inside` a folder for untrusted ones."""

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


class Anywhere:
    """Paths in the user's tables: absolute, or relative to a root; links and `..` are allowed."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def check(self, path: str, where: str) -> str:
        """The path in plain form; see `Inside.check`."""
        plain = path.strip()
        if not plain or "\0" in plain:
            raise DataError(f"{where}: the path {path!r} is empty or malformed")
        absolute = os.path.isabs(plain) or _DRIVE.match(plain) is not None
        plain = plain if absolute else plain.replace("\\", "/")
        plain = os.path.normpath(plain).replace(os.sep, "/")
        if plain == "." or plain.endswith(".."):
            raise DataError(f"{where}: the path {path!r} names a folder, not an image")
        return plain


class Inside:
    """Checks that relative paths stay inside a root after resolving links.

    The root itself may be a link to a dataset elsewhere. Each folder is resolved once.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._real = os.path.realpath(self.root)
        self._folders: dict[str, bool] = {}

    def check(self, path: str, where: str) -> str:
        """The path in plain form (`/`, no `.` or inner `..`); it need not exist.

        Args:
            path: as written in the file.
            where: file and row, for messages.
        """
        plain = path.strip().replace("\\", "/")
        if not plain or "\0" in plain:
            raise DataError(f"{where}: the path {path!r} is empty or malformed")
        if plain.startswith("/") or _DRIVE.match(plain):
            raise DataError(f"{where}: a path must be relative to {self.root}, got the absolute {path!r}")
        plain = os.path.normpath(plain).replace(os.sep, "/")
        if plain == ".." or plain.startswith("../"):
            raise DataError(f"{where}: a path must stay inside {self.root}, but {path!r} leaves it")
        folder, name = os.path.split(plain)
        if folder not in self._folders:
            self._folders[folder] = self._stays(folder)
        full = os.path.join(self._real, plain)
        if not self._folders[folder] or (os.path.islink(full) and not self._stays(plain)):
            raise DataError(f"{where}: a path must stay inside {self.root}, but {path!r} leaves it by a link")
        if not name or plain == ".":
            raise DataError(f"{where}: the path {path!r} names a folder, not an image")
        return plain

    def _stays(self, relative: str) -> bool:
        real = os.path.realpath(os.path.join(self._real, relative))
        return real == self._real or real.startswith(self._real.rstrip(os.sep) + os.sep)
