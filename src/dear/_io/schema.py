"""Declared schemas for JSON files that others may have written: role maps, run configs, cells, metadata.

A schema is a subclass of `Strict`: a frozen msgspec struct that refuses keys it does not name. `decode`
parses the text under the rules of `parse_json` (no repeated keys, no NaN or infinity, bounded depth and size)
and checks every value against the schema; what does not fit is one error with the file, the place in it and
what is expected there. Needs no PyTorch, so exported models can use it too.

    class Size(Strict, frozen=True):
        width: Annotated[int, Meta(ge=1, le=4096)]
        name: Line = ""

    decode(text, Size, "size.json", "image size")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from dear._io.printable import PRINTABLE
from dear._io.strict_json import parse_json
from dear.errors import DearError

MAX_BYTES = 64 * 1024 * 1024

Result = TypeVar("Result")
_NAME = rf"(?=.*\S){PRINTABLE}"
Whole = Annotated[int, Meta(ge=0, lt=2**53)]
"""A whole number that every JSON reader holds exactly."""
Line = Annotated[str, Meta(max_length=1000, pattern=PRINTABLE)]
"""A text that can be shown: at most 1,000 characters, no control characters."""
Word = Annotated[str, Meta(max_length=80, pattern=_NAME)]
"""A name that can be shown: not blank, at most 80 characters, no control characters."""
_IN_WORDS = {
    f"`str` matching regex {PRINTABLE!r}": "plain text without control characters",
    f"`str` matching regex {_NAME!r}": "plain text that is not blank, without control characters",
}


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of schemas: unknown keys are refused, values are never converted ("1" is no number, true no 1)."""


def decode(
    text: str,
    schema: type[Result],
    source: str,
    what: str,
    *,
    error: type[DearError] = DearError,
    upgrade: Callable[[Any], Any] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Result:
    """Read JSON text as a schema.

    Args:
        text: the file's text.
        schema: a `Strict` class, or any type msgspec can check.
        source: the file, for messages.
        what: what the file should be, for messages ("role map").
        error: the class of the errors about values that do not fit.
        upgrade: called with the parsed document before it is checked; brings older files up to date.
        max_bytes: longer texts are refused.

    Raises:
        DearError: the text is too long or is not JSON under the rules of `parse_json`; or, as `error`, a
            value does not fit: the place is named.

    >>> decode('[1, "x"]', list[int], "sizes.json", "list of sizes")
    Traceback (most recent call last):
    dear.errors.DearError: sizes.json: is not a valid list of sizes (at [1]: expected `int`, got `str`)
    """
    if len(text) > max_bytes:
        raise error(f"{source}: more than {max_bytes:,} bytes are too large for a {what}")
    return check(parse_json(text, source, what), schema, source, what, error=error, upgrade=upgrade)


def check(
    document: Any,
    schema: type[Result],
    source: str,
    what: str,
    *,
    error: type[DearError] = DearError,
    upgrade: Callable[[Any], Any] | None = None,
) -> Result:
    """Check a parsed document against a schema; see `decode`.

    Raises:
        DearError: as `error`, a value does not fit: the place is named.
    """
    try:
        return msgspec.convert(document if upgrade is None else upgrade(document), schema, strict=True)
    except (msgspec.ValidationError, ValueError) as problem:
        raise error(f"{source}: is not a valid {what} ({_sentence(str(problem))})") from None


def _sentence(message: str) -> str:
    """The message of msgspec with the place first: "Expected X - at `$.a[0]`" is "at a[0]: expected X"."""
    body, _, place = message.partition(" - at `")
    for pattern, words in _IN_WORDS.items():
        body = body.replace(pattern, words)
    if body.startswith("Object "):
        body = body.replace("Object contains", "contains").replace("Object missing", "lacks the")
    elif body[:1].isupper():
        body = body[0].lower() + body[1:]
    place = place.rstrip("`").removeprefix("key` in `").removeprefix("$").removeprefix(".")
    place = place.replace("[...]", "[a value]")
    return f"at {place}: {body}" if place else body
