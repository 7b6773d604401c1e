"""Checks text from outside before it is shown: no control or direction characters.

Names come from folders, tables, role maps and runs that somebody else made, and go to terminals, pages and
prompts. Control characters (a terminal obeys them), halves of characters (no file can hold them), line
separators and marks that turn the reading direction are refused where names enter.
"""

from __future__ import annotations

import re

from dear.errors import InputError, UsageError

MAX_NAME = 200

_HIDDEN = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_UNSHOWN = re.compile(f"[{_HIDDEN}]")
PRINTABLE = rf"^[^{_HIDDEN}]*\Z"  #: pattern of a text without characters that must not be shown


def unprintable(text: str) -> str | None:
    r"""The first character of a text that must not be shown, as U+001B; None if there is none.

    >>> unprintable("caf\u00e9"), unprintable("a\x1b[2J")
    (None, 'U+001B')
    """
    found = _UNSHOWN.search(text)
    return None if found is None else f"U+{ord(found[0]):04X}"


def shown(text: str) -> str:
    r"""A message for the terminal: what must not be shown is spelled out, line ends stay.

    >>> shown("gone: a\x1b[2J.jpg")
    'gone: a\\x1b[2J.jpg'
    """
    return _UNSHOWN.sub(
        lambda found: found[0] if found[0] == "\n" else found[0].encode("unicode_escape").decode(), text
    )


def fill_template(template: str, name: str) -> str:
    """The prompt of one class; braces in the name are kept as they are.

    Raises:
        UsageError: the template has no place for the name.

    >>> fill_template("a photo of a {}, a type of pet.", "beagle")
    'a photo of a beagle, a type of pet.'
    """
    if "{}" not in template:
        raise UsageError(f"the template {template!r} has no {{}} for the class name")
    return template.replace("{}", name)


def check_name(name: str) -> str:
    """A class name that can stand in a prompt and on a page; returned as it came.

    Raises:
        InputError: it is blank, longer than 200 characters, or holds control characters.
    """
    if not name.strip():
        raise InputError(f"the class name {name[:40]!r} is blank; give it a name")
    if len(name) > MAX_NAME:
        raise InputError(
            f"the class name {name[:40]!r}… has {len(name)} characters; at most {MAX_NAME} are allowed"
        )
    return check_shown(name, "class name")


def check_shown(text: str, what: str) -> str:
    """A text without characters that must not be shown; returned as it came.

    Raises:
        InputError: it holds one; `what` says what the text is.
    """
    found = unprintable(text)
    if found is not None:
        raise InputError(f"the {what} {text[:80]!r} holds the control character {found}; remove it")
    return text
