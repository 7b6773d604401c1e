"""Bearer keys: which adapters a key opens, and which key may manage the service.

The key file is JSON: `{"keys": [{"key": "...", "models": ["pets", "food"]}], "management": "..."}`; `"*"` in
`models` opens every adapter. Keys are compared as digests, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import msgspec

from dear._io.text import decode
from dear.errors import UsageError
from dear.serve.errors import Refused

_SHORTEST = 16  # characters; shorter keys can be guessed
EVERY = "*"


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One key and the names of the adapters it opens."""

    key: str
    models: list[str]


class KeyFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The file of keys."""

    keys: list[KeyEntry] = []
    management: str | None = None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Keys:
    """Who may do what. Without a key file every adapter is open and management is off."""

    def __init__(self, file: KeyFile | None = None) -> None:
        self.required = file is not None
        entries = file.keys if file else []
        secrets = [entry.key for entry in entries] + ([file.management] if file and file.management else [])
        if any(len(secret) < _SHORTEST for secret in secrets):
            raise UsageError(f"a key has fewer than {_SHORTEST} characters; choose longer ones")
        if len(set(secrets)) != len(secrets):
            raise UsageError("a key stands twice in the key file; every key needs one entry")
        self._opens = [(_digest(entry.key), frozenset(entry.models)) for entry in entries]
        self._management = _digest(file.management) if file and file.management else None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Keys:
        """Read a key file.

        Raises:
            DearError: it cannot be read or is not one.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: the key file cannot be read ({error})") from error
        return cls(decode(text, KeyFile, str(path), "key file"))

    def opened(self, header: str | None) -> frozenset[str]:
        """Names of the adapters that an Authorization header opens; `EVERY` among them opens all.

        Raises:
            Refused: keys are required and this is none of them.
        """
        if not self.required:
            return frozenset((EVERY,))
        given = _digest(_bearer(header))
        opened: frozenset[str] = frozenset()
        known = False
        for digest, models in self._opens:  # all are compared, so that time tells nothing
            if hmac.compare_digest(digest, given):
                opened, known = models, True
        if not known:
            raise Refused(401, "this key is not known; send Authorization: Bearer KEY")
        return opened

    def check_management(self, header: str | None) -> None:
        """Refuse a request that may not manage the service."""
        if self._management is None:
            raise Refused(403, "management is off: the key file of this service names no management key")
        if not hmac.compare_digest(self._management, _digest(_bearer(header))):
            raise Refused(401, "this is not the management key")


def _bearer(header: str | None) -> str:
    """The key of an Authorization header; empty where there is none."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.casefold() == "bearer" else ""
