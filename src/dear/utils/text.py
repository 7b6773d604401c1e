"""Text from outside, checked before it is shown, and text for people: names, numbers, durations, suggestions.

Names come from folders, tables, role maps and runs of other people, and go to terminals, pages and prompts.
Control characters (a terminal executes them), unpaired surrogates (no file can contain them), line separators
and marks that change the reading direction are refused on input.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

from dear.errors import InputError, UsageError

MAX_NAME = 200

_HIDDEN = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_UNSHOWN = re.compile(f"[{_HIDDEN}]")
PRINTABLE = rf"^[^{_HIDDEN}]*\Z"  #: pattern of a text without control characters and their like


def first_unprintable(text: str) -> str | None:
    r"""The first unprintable character of a text, as U+001B; None if there is none.

    >>> first_unprintable("caf\u00e9"), first_unprintable("a\x1b[2J")
    (None, 'U+001B')
    """
    match = _UNSHOWN.search(text)
    return None if match is None else f"U+{ord(match[0]):04X}"


def format_count(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun.

    >>> format_count(1, "image"), format_count(1200, "image"), format_count(2, "class", "classes")
    ('1 image', '1,200 images', '2 classes')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_bytes(count: int) -> str:
    """A size for people.

    >>> format_bytes(7_424), format_bytes(163_840), format_bytes(21_800_000)
    ('7 kB', '164 kB', '21.8 MB')
    """
    return f"{count / 1e3:.0f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"


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
    suggestion = close_name(name, known)
    remedy = f"did you mean {suggestion!r}?" if suggestion is not None else f"choose from {', '.join(known)}"
    return f"unknown {kind} {name[:80]!r}; {remedy}"


def close_name(name: str, choices: Iterable[str]) -> str | None:
    """The choice closest to a misspelled name, ignoring case and punctuation; None if none is close.

    >>> close_name("oenai/clip-vit-base-patch16", ["openai/clip-vit-base-patch16", "mini"])
    'openai/clip-vit-base-patch16'
    """
    plain = {re.sub(r"[\W_]", "", choice.casefold()): choice for choice in choices}
    matches = difflib.get_close_matches(re.sub(r"[\W_]", "", name[:200].casefold()), plain, 1)
    return plain[matches[0]] if matches else None


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
    character = first_unprintable(text)
    if character is not None:
        raise InputError(f"the {what} {text[:80]!r} contains the control character {character}; remove it")
    return text


def format_duration(seconds: float) -> str:
    """A duration in words.

    >>> [format_duration(value) for value in (2.34, 75, 7300)]
    ['2.3 s', '75 s', '2 h 2 min']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
