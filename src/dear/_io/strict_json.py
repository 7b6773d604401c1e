"""Strict parsing of JSON from outside: no repeated keys, no NaN, bounded size and depth. Needs no PyTorch."""

from __future__ import annotations

import json
import math
from typing import Any

from dear.errors import DearError

MAX_DEPTH = 100


def parse_json(text: str, source: str, what: str = "JSON text") -> Any:
    r"""Parse JSON text from `source` (named in messages).

    Refused are: a key that stands twice in one object (one of its values would be hidden), NaN, infinity and
    numbers too large for a float, halves of characters, and nesting deeper than `MAX_DEPTH`.

    Raises:
        DearError: the text is not JSON, or is refused.

    >>> parse_json('{"a": 1, "a": 2}', "x.json")
    Traceback (most recent call last):
    dear.errors.DearError: x.json: is not a valid JSON text (the key 'a' stands twice in one object)
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _check_depth(value)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise DearError(f"{source}: nested too deeply for a {what}") from None
    except UnicodeEncodeError:
        raise DearError(f"{source}: is not a valid {what} (a text holds half a character)") from None
    except ValueError as error:
        raise DearError(f"{source}: is not a valid {what} ({error})") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys must differ: a repeated key hides one of its values."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated[:80]!r} stands twice in one object")
    return result


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _whole(digits: str) -> int:
    if len(digits) > 300:  # as a float it would be infinite
        raise ValueError(f"the number {digits[:40]}… is too large")
    return int(digits)


def _check_depth(value: Any) -> None:
    """Raise where lists and objects stand in one another more than `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise RecursionError
