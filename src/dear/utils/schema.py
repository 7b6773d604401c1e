"""JSON from outside: parsed strictly, and checked against schemas.

`parse_json` refuses repeated keys, NaN and infinity, and bounds depth and size. A schema is a subclass of
`Strict`: a frozen msgspec struct that refuses keys it does not name. `decode` parses a text and checks every
value against the schema; the error names the file, the position in it, and what is expected there.

    class Size(Strict, frozen=True):
        width: Annotated[int, Meta(ge=1, le=4096)]
        name: Line = ""

    decode(text, Size, "size.json", "image size")

This module needs no PyTorch and reads no files.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from dear.errors import DearError
from dear.utils.text import PRINTABLE

MAX_DEPTH = 100
MAX_BYTES = 64 * 1024 * 1024

Result = TypeVar("Result")
_NAME = rf"(?=.*\S){PRINTABLE}"
Whole = Annotated[int, Meta(ge=0, lt=2**53)]
"""A whole number that every JSON reader represents exactly."""
Line = Annotated[str, Meta(max_length=1000, pattern=PRINTABLE)]
"""A printable text of at most 1,000 characters."""
Word = Annotated[str, Meta(max_length=80, pattern=_NAME)]
"""A printable name: not blank, at most 80 characters."""
_DESCRIPTIONS = {
    f"`str` matching regex {PRINTABLE!r}": "plain text without control characters",
    f"`str` matching regex {_NAME!r}": "plain text that is not blank, without control characters",
}


def parse_json(text: str, source: str, what: str = "JSON text") -> Any:
    r"""Parse JSON text from `source` (named in messages).

    Refused are: a key that occurs twice in one object (one of its values would be hidden), NaN, infinity and
    numbers too large for a float, unpaired surrogates, and nesting deeper than `MAX_DEPTH`.

    >>> parse_json('{"a": 1, "a": 2}', "x.json")
    Traceback (most recent call last):
    dear.errors.DearError: x.json: is not a valid JSON text (the key 'a' occurs twice in one object)
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object_without_repeated_keys,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_int,
        )
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _check_depth(value)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise DearError(f"{source}: nested too deeply for a {what}") from None
    except UnicodeEncodeError:
        raise DearError(f"{source}: is not a valid {what} (half of a surrogate pair)") from None
    except ValueError as error:
        raise DearError(f"{source}: is not a valid {what} ({error})") from error
    return value


def _object_without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys must differ: a repeated key hides one of its values."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated[:80]!r} occurs twice in one object")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _parse_int(digits: str) -> int:
    if len(digits) > 300:  # as a float it would be infinite
        raise ValueError(f"the number {digits[:40]}… is too large")
    return int(digits)


def _check_depth(value: Any) -> None:
    """Raise where lists and objects are nested more than `MAX_DEPTH` deep."""
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


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of schemas: unknown keys are refused, values are never converted (true is not 1)."""


def decode(
    text: str,
    schema: type[Result],
    source: str,
    what: str,
    *,
    error: type[DearError] = DearError,
    max_bytes: int = MAX_BYTES,
) -> Result:
    """Read JSON text as a schema.

    Args:
        text: the file's text.
        schema: a `Strict` class, or any type msgspec can check.
        source: the file, for messages.
        what: kind of file, for messages ("role map").
        error: the class of the errors about values that do not fit.
        max_bytes: longer texts are refused.

    >>> decode('[1, "x"]', list[int], "sizes.json", "list of sizes")
    Traceback (most recent call last):
    dear.errors.DearError: sizes.json: is not a valid list of sizes (at [1]: expected `int`, got `str`)
    """
    if len(text) > max_bytes:
        raise error(f"{source}: a {what} must have at most {max_bytes:,} bytes")
    return check(parse_json(text, source, what), schema, source, what, error=error)


def check(
    document: Any,
    schema: type[Result],
    source: str,
    what: str,
    *,
    error: type[DearError] = DearError,
) -> Result:
    """Check a parsed document against a schema; see `decode`."""
    try:
        return msgspec.convert(document, schema, strict=True)
    except (msgspec.ValidationError, ValueError) as problem:
        raise error(f"{source}: is not a valid {what} ({_describe(str(problem))})") from None


def _describe(message: str) -> str:
    """The message of msgspec with the position first: "Expected X - at `$.a[0]`" is "at a[0]: expected X"."""
    body, _, position = message.partition(" - at `")
    for pattern, words in _DESCRIPTIONS.items():
        body = body.replace(pattern, words)
    if body.startswith("Object "):
        body = body.replace("Object contains", "contains").replace("Object missing", "lacks the")
    elif body[:1].isupper():
        body = body[0].lower() + body[1:]
    position = position.rstrip("`").removeprefix("key` in `").removeprefix("$").removeprefix(".")
    position = position.replace("[...]", "[a value]")
    return f"at {position}: {body}" if position else body
