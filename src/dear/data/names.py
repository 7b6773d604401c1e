"""Readable class names, their order, and prompt templates."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from natsort import natsort_keygen, ns

from dear._io.printable import check_name, check_shown
from dear.errors import DataError, InputError

TEMPLATE = "a photo of a {}."
MAX_TEMPLATE = 1000

_WORDNET = re.compile(r"n[0-9]{8}")
_NUMBER = re.compile(r"[0-9]+\.(?=[^\W\d_])")  # the "001." of "001.Black_footed_Albatross"
_CAMEL = re.compile(r"[A-Z][a-z]{2,}(?:[A-Z][a-z]+)+")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_NATURAL = natsort_keygen(alg=ns.IGNORECASE)


def readable(raw: str) -> str:
    """The natural reading of a folder's or label's name.

    Underscores become spaces; a leading "001." goes; a name that is all CamelCase is parted ("SeaLake" is
    "Sea Lake", but "McDonald" stays); WordNet ids stay as they are. Case is kept: the tokenizer ignores it.

    Raises:
        InputError: nothing readable is left, or the name is too long or holds control characters.

    >>> [readable(raw) for raw in ("golden_retriever", "SeaLake", "001.Black_footed_Albatross", "n01440764")]
    ['golden retriever', 'Sea Lake', 'Black footed Albatross', 'n01440764']
    """
    check_name(raw)
    name = unicodedata.normalize("NFC", raw).strip()
    if _WORDNET.fullmatch(name):
        return name
    name = _NUMBER.sub("", name, count=1) if _NUMBER.match(name) else name
    if _CAMEL.fullmatch(name):
        name = _HUMP.sub(" ", name)
    name = spaced(name)
    if not name:
        raise InputError(f"the class name {raw!r} has nothing to read; rename it")
    return name


def spaced(name: str) -> str:
    """A published class name as the field reads it: underscores are spaces, nothing else changes.

    >>> spaced("american_pit_bull_terrier")
    'american pit bull terrier'
    """
    return " ".join(name.replace("_", " ").split())


def check_template(template: str) -> str:
    """A prompt template with exactly one `{}` and no other braces; returned as it came.

    Raises:
        InputError: it has none, several, or other braces, or holds control characters.

    >>> check_template("a photo of a {}, a type of pet.")
    'a photo of a {}, a type of pet.'
    """
    if len(template) > MAX_TEMPLATE:
        raise InputError(f"the template {template[:40]!r}… is too long; at most {MAX_TEMPLATE} characters")
    check_shown(template, "template")
    count = template.count("{}")
    if count != 1:
        raise InputError(
            f"the template {template!r} must hold {{}} once, where the class name goes, not {count} times"
        )
    if re.search(r"[{}]", template.replace("{}", "")):
        raise InputError(f"the template {template!r} holds a brace beside its {{}}; leave only {{}}")
    return template


def check_classes(raw: Sequence[str], names: Sequence[str], where: str) -> tuple[str, ...]:
    """The names, if every two of them read differently.

    Args:
        raw: what the data calls its classes (folders, labels), for messages.
        names: their readings.
        where: the dataset, for messages.

    Raises:
        DataError: two classes read the same, whatever their case; both are named.
    """
    seen: dict[str, str] = {}
    for original, name in zip(raw, names, strict=True):
        reading = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        if reading in seen:
            raise DataError(
                f"{where}: the classes {seen[reading]!r} and {original!r} both read {name!r}; "
                f"rename or merge them"
            )
        seen[reading] = original
    return tuple(names)


def natural_key(text: str) -> tuple[object, ...]:
    """Key for natural sorting: case does not matter, "img2" comes before "img10", different texts never tie.

    >>> sorted(["b10", "B2", "a"], key=natural_key)
    ['a', 'B2', 'b10']
    """
    return (_NATURAL(text), text)
