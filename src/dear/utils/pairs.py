"""`NAME=VALUE` settings as people write them on a command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dear.errors import UsageError


def parse_pairs(items: Sequence[str] | Mapping[str, Any] | None, option: str) -> dict[str, Any]:
    """`NAME=VALUE` texts as a mapping, values read as JSON where they are JSON; a mapping stays as it is.

    Raises:
        UsageError: a text has no name or no value; the message starts with `option`.

    >>> parse_pairs(["beta=0.8", "isolation=readonly"], "options")
    {'beta': 0.8, 'isolation': 'readonly'}
    """
    if isinstance(items, Mapping):
        return dict(items)
    result: dict[str, Any] = {}
    for item in items or ():
        name, sign, value = item.partition("=")
        if not sign or not name:
            raise UsageError(f"{option}: expected NAME=VALUE, got {item!r}")
        try:
            result[name] = json.loads(value)
        except ValueError:
            result[name] = value
    return result


def split_names(text: str) -> list[str]:
    """Comma-separated names, each once.

    >>> split_names("coop, dear,coop")
    ['coop', 'dear']
    """
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
