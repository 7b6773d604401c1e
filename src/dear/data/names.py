"""Class names and prompt templates: read from folders and labels, checked, and sorted."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from dear.errors import DataError, InputError
from dear.utils.text import check_name, check_printable

MAX_TEMPLATE = 1000
#: names of folders and of splits of Hugging Face datasets, by split
SPLITS = {"train": ("train", "training"), "test": ("test", "testing"), "val": ("val", "valid", "validation")}
_WORDNET = re.compile(r"n[0-9]{8}")
_NUMBER = re.compile(r"[0-9]+\.(?=[^\W\d_])")  # the "001." of "001.Black_footed_Albatross"
_CAMEL = re.compile(r"[A-Z][a-z]{2,}(?:[A-Z][a-z]+)+")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")


@lru_cache(maxsize=1)
def _natural() -> Callable[[str], Any]:
    """A key for natural sorting; its library is imported when names are sorted."""
    from natsort import natsort_keygen, ns

    return natsort_keygen(alg=ns.IGNORECASE)


def readable(raw: str) -> str:
    """A readable class name from the name of a folder or a label.

    Underscores become spaces; a leading "001." is removed; CamelCase is split ("SeaLake" becomes "Sea Lake",
    but "McDonald" is kept); WordNet ids are kept. Case is kept: the tokenizer ignores it.

    >>> readable("golden_retriever"), readable("SeaLake"), readable("n01440764")
    ('golden retriever', 'Sea Lake', 'n01440764')
    >>> readable("001.Black_footed_Albatross")
    'Black footed Albatross'
    """
    check_name(raw)
    name = unicodedata.normalize("NFC", raw).strip()
    if _WORDNET.fullmatch(name):
        return name
    name = _NUMBER.sub("", name, count=1) if _NUMBER.match(name) else name
    if _CAMEL.fullmatch(name):
        name = _HUMP.sub(" ", name)
    name = underscores_to_spaces(name)
    if not name:
        raise InputError(f"the class name {raw!r} contains no word; rename it")
    return name


def underscores_to_spaces(name: str) -> str:
    """A published class name with spaces instead of underscores, as in CoOp's code.

    >>> underscores_to_spaces("american_pit_bull_terrier")
    'american pit bull terrier'
    """
    return " ".join(name.replace("_", " ").split())


def check_template(template: str) -> str:
    """Check that a prompt template has exactly one `{}` and no other braces, and return it.

    >>> check_template("a photo of a {}, a type of pet.")
    'a photo of a {}, a type of pet.'
    """
    if len(template) > MAX_TEMPLATE:
        raise InputError(
            f"a template must have at most {MAX_TEMPLATE} characters, got {len(template)}: {template[:40]!r}…"
        )
    check_printable(template, "template")
    count = template.count("{}")
    if count != 1:
        raise InputError(
            f"a template must contain {{}} once, for the class name, got {count} times in {template!r}"
        )
    if re.search(r"[{}]", template.replace("{}", "")):
        raise InputError(f"a template must contain no braces but {{}}, got {template!r}; remove the others")
    return template


def check_classes(raw: Sequence[str], names: Sequence[str], where: str) -> tuple[str, ...]:
    """Check that class names differ by more than case and spaces, and return them.

    Args:
        raw: names of the classes in the data (folders, labels), for messages.
        names: their readable names.
        where: the dataset, for messages.
    """
    originals: dict[str, str] = {}
    for original, name in zip(raw, names, strict=True):
        reading = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        if reading in originals:
            raise DataError(
                f"{where}: the classes {originals[reading]!r} and {original!r} both read {name!r}; "
                f"rename or merge them"
            )
        originals[reading] = original
    return tuple(names)


def natural_key(text: str) -> tuple[object, ...]:
    """Key for natural sorting: case does not matter, "img2" comes before "img10", different texts never tie.

    >>> sorted(["b10", "B2", "a"], key=natural_key)
    ['a', 'B2', 'b10']
    """
    return (_natural()(text), text)
