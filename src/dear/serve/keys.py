"""Bearer keys: which adapters a key has access to, its limits, and which key manages the service.

The key file is JSON: `{"keys": [{"key": "...", "models": ["pets"], "name": "shop"}], "management": "..."}`;
`"*"` in `models` is every adapter; `requests` and `rate` limit a key's requests at once and per second.
Keys are compared as digests, in constant time. The file is read again when it changes.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dear.errors import DearError, UsageError
from dear.serve.errors import Refused
from dear.utils.digest import of_parts
from dear.utils.schema import Word, decode

_SHORTEST = 16  # characters; shorter keys can be guessed
EVERY = "*"
MANAGEMENT = "management"  #: name of the management key in logs


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One key and the names of the adapters it has access to."""

    key: str
    models: list[str]
    name: Word | None = None  #: in logs; else its place in the file
    requests: Annotated[int, Meta(ge=1)] | None = None  #: being answered at once
    rate: Annotated[float, Meta(gt=0)] | None = None  #: requests per second


class KeyFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The file of keys."""

    keys: list[KeyEntry] = []
    management: str | None = None


@dataclass(frozen=True)
class Caller:
    """Who sends a request."""

    name: str  #: of the key; without keys the client's address
    models: frozenset[str] = frozenset((EVERY,))  #: names of adapters, or `EVERY`
    requests: int | None = None  #: at once; None: the service's limit
    rate: float | None = None  #: requests per second; None: the service's limit

    def can_access(self, model: str) -> bool:
        """Whether it may use an adapter."""
        return EVERY in self.models or model in self.models


class Keys:
    """Who may do what. Without a key file every adapter is open and management is off."""

    def __init__(self, file: KeyFile | None = None) -> None:
        self.path: Path | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._set(file)

    def _set(self, file: KeyFile | None) -> None:
        entries = file.keys if file else []
        secrets = [entry.key for entry in entries] + ([file.management] if file and file.management else [])
        if any(len(secret) < _SHORTEST for secret in secrets):
            raise UsageError(f"a key must have at least {_SHORTEST} characters; choose a longer one")
        if len(set(secrets)) != len(secrets):
            raise UsageError("duplicate key in the key file; every key needs one entry")
        names = [entry.name or f"key {number}" for number, entry in enumerate(entries, 1)]
        if len({*names, MANAGEMENT}) != len(names) + 1:
            raise UsageError("duplicate name in the key file; every key needs another name")
        self.required = file is not None
        self._callers = [
            (of_parts(entry.key), Caller(name, frozenset(entry.models), entry.requests, entry.rate))
            for name, entry in zip(names, entries, strict=True)
        ]
        self._management = of_parts(file.management) if file and file.management else None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Keys:
        """Read a key file."""
        keys = cls()
        keys.path = Path(path)
        keys._read(keys._read_stamp())
        return keys

    def reload(self) -> bool:
        """Read the file again if it has changed; returns whether it has."""
        if self.path is None:
            return False
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        self._read(stamp)
        return True

    def _read(self, stamp: tuple[int, int, int] | None) -> None:
        self._stamp = stamp  # also of a file that is refused: it is reported once
        try:
            text = Path(self.path or "").read_text(encoding="utf-8")
            self._set(decode(text, KeyFile, str(self.path), "key file"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.path}: the key file cannot be read ({error})") from error
        except DearError as error:
            named = str(error) if str(self.path) in str(error) else f"{self.path}: {error}"
            raise UsageError(named) from error

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self.path or "")
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    @property
    def has_multiple_callers(self) -> bool:
        """Whether callers share the service, so that none may have all of it."""
        return self.required and len(self._callers) != 1

    def caller(self, header: str | None, client: str) -> Caller:
        """Who sends an Authorization header."""
        if not self.required:
            return Caller(client)
        digest, match = of_parts(_bearer(header)), None
        for known, caller in self._callers:  # all are compared: the time is the same for every key
            if hmac.compare_digest(known, digest):
                match = caller
        if match is None:
            raise Refused(401, "unknown key; send Authorization: Bearer KEY")
        return match

    def any_caller(self, header: str | None, client: str) -> Caller:
        """Who sends an Authorization header; the management key has access to every adapter."""
        return Caller(MANAGEMENT) if self._manages(header) else self.caller(header, client)

    def check_management(self, header: str | None) -> None:
        """Refuse a request that may not manage the service."""
        if self._management is None:
            raise Refused(
                403, "management needs a key file with a management key, which this service does not have"
            )
        if not self._manages(header):
            raise Refused(401, "management needs the management key; send Authorization: Bearer KEY")

    def _manages(self, header: str | None) -> bool:
        known = self._management
        return known is not None and hmac.compare_digest(known, of_parts(_bearer(header)))


def _bearer(header: str | None) -> str:
    """The key of an Authorization header; empty where there is none."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.casefold() == "bearer" else ""
