"""Text from outside, checked before it is used: names and messages to show, JSON, and schemas of JSON files.

Names come from folders, tables, role maps and runs of other people, and go to terminals, pages and prompts.
Control characters (a terminal executes them), unpaired surrogates (no file can contain them), line separators
and marks that change the reading direction are refused on input.

`parse_json` refuses repeated keys, NaN and infinity, and bounds depth and size. A schema is a subclass of
`Strict`: a frozen msgspec struct that refuses keys it does not name. `decode` parses a text and checks every
value against the schema; the error names the file, the position in it, and what is expected
there.

    class Size(Strict, frozen=True):
        width: Annotated[int, Meta(ge=1, le=4096)]
        name: Line = ""

    decode(text, Size, "size.json", "image size")

This module needs no PyTorch and reads no files.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from dear.errors import DearError, InputError, UsageError

MAX_NAME = 200

_HIDDEN = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_UNSHOWN = re.compile(f"[{_HIDDEN}]")
PRINTABLE = rf"^[^{_HIDDEN}]*\Z"  #: pattern of a text without control characters and their like


def unprintable(text: str) -> str | None:
    r"""The first unprintable character of a text, as U+001B; None if there is none.

    >>> unprintable("caf\u00e9"), unprintable("a\x1b[2J")
    (None, 'U+001B')
    """
    match = _UNSHOWN.search(text)
    return None if match is None else f"U+{ord(match[0]):04X}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun.

    >>> counted(1, "image"), counted(1200, "image"), counted(2, "class", "classes")
    ('1 image', '1,200 images', '2 classes')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def escape_control(text: str) -> str:
    r"""A message for the terminal, with unprintable characters escaped; line ends are kept.

    >>> escape_control("gone: a\x1b[2J.jpg")
    'gone: a\\x1b[2J.jpg'
    """
    return _UNSHOWN.sub(
        lambda match: match[0] if match[0] == "\n" else match[0].encode("unicode_escape").decode(), text
    )


def spreadsheet_safe(text: str) -> str:
    """A cell of a table that no spreadsheet runs as a formula.

    >>> spreadsheet_safe("=1+1"), spreadsheet_safe("cat")
    ("'=1+1", 'cat')
    """
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> str:
    """A message for an unknown name, with the closest known one, or all if none is close.

    >>> unknown_name("method", "linearprobe", ["dear", "linear-probe"])
    "unknown method 'linearprobe'; did you mean 'linear-probe'?"
    >>> unknown_name("method", "xyz", ["dear", "linear-probe"])
    "unknown method 'xyz'; choose from dear, linear-probe"
    """
    known = list(choices)
    near = close_name(name, known)
    remedy = f"did you mean {near!r}?" if near is not None else f"choose from {', '.join(known)}"
    return f"unknown {kind} {name[:80]!r}; {remedy}"


def close_name(name: str, choices: Iterable[str]) -> str | None:
    """The choice closest to a misspelled name, ignoring case and punctuation; None if none is close.

    >>> close_name("oenai/clip-vit-base-patch16", ["openai/clip-vit-base-patch16", "mini"])
    'openai/clip-vit-base-patch16'
    """
    plain = {re.sub(r"[\W_]", "", choice.casefold()): choice for choice in choices}
    near = difflib.get_close_matches(re.sub(r"[\W_]", "", name[:200].casefold()), plain, 1)
    return plain[near[0]] if near else None


def fill_template(template: str, name: str) -> str:
    """The prompt of one class; braces in the name are kept as they are.

    >>> fill_template("a photo of a {}, a type of pet.", "beagle")
    'a photo of a beagle, a type of pet.'
    """
    if "{}" not in template:
        raise UsageError(f"the template must contain {{}} for the class name, got {template!r}")
    return template.replace("{}", name)


def check_name(name: str) -> str:
    """A class name that fits into a prompt and a page; returned unchanged."""
    if not name.strip():
        raise InputError(f"the class name {name[:40]!r} is blank; give it a name")
    if len(name) > MAX_NAME:
        raise InputError(
            f"the class name {name[:40]!r}… has {len(name)} characters; at most {MAX_NAME} are allowed"
        )
    return check_printable(name, "class name")


def fold_name(name: str) -> str:
    """A class name without differences that CLIP ignores: case, underscores, spaces, Unicode forms.

    >>> fold_name("Tabby_cat") == fold_name("tabby  CAT")
    True
    """
    return " ".join(unicodedata.normalize("NFKC", name).replace("_", " ").casefold().split())


def check_printable(text: str, what: str) -> str:
    """A text without unprintable characters, returned unchanged; `what` names it in messages."""
    character = unprintable(text)
    if character is not None:
        raise InputError(f"the {what} {text[:80]!r} contains the control character {character}; remove it")
    return text


MAX_DEPTH = 100


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
        raise DearError(f"{source}: is not a valid {what} (half of a surrogate pair)") from None
    except ValueError as error:
        raise DearError(f"{source}: is not a valid {what} ({error})") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys must differ: a repeated key hides one of its values."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated[:80]!r} occurs twice in one object")
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


MAX_BYTES = 64 * 1024 * 1024

Result = TypeVar("Result")
_NAME = rf"(?=.*\S){PRINTABLE}"
Whole = Annotated[int, Meta(ge=0, lt=2**53)]
"""A whole number that every JSON reader represents exactly."""
Line = Annotated[str, Meta(max_length=1000, pattern=PRINTABLE)]
"""A printable text of at most 1,000 characters."""
Word = Annotated[str, Meta(max_length=80, pattern=_NAME)]
"""A printable name: not blank, at most 80 characters."""
_IN_WORDS = {
    f"`str` matching regex {PRINTABLE!r}": "plain text without control characters",
    f"`str` matching regex {_NAME!r}": "plain text that is not blank, without control characters",
}


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of schemas: unknown keys are refused, values are never converted (true is not 1)."""


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
        what: kind of file, for messages ("role map").
        error: the class of the errors about values that do not fit.
        upgrade: called with the parsed document before it is checked; updates older files.
        max_bytes: longer texts are refused.

    >>> decode('[1, "x"]', list[int], "sizes.json", "list of sizes")
    Traceback (most recent call last):
    dear.errors.DearError: sizes.json: is not a valid list of sizes (at [1]: expected `int`, got `str`)
    """
    if len(text) > max_bytes:
        raise error(f"{source}: a {what} must have at most {max_bytes:,} bytes")
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
    """Check a parsed document against a schema; see `decode`."""
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


def duration(seconds: float) -> str:
    """A duration in words.

    >>> [duration(value) for value in (2.34, 75, 7300)]
    ['2.3 s', '75 s', '2 h 2 min']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
