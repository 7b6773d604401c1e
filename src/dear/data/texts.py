"""Several texts per class: a JSON file in CuPL's format, a mapping, or the column `texts` of a table.

`{"tabby cat": ["A tabby cat has dark stripes.", "kitty"], …}`: an entry of at most three words without a
full stop is a name and is inserted into the template; any other entry is a sentence. Case, underscores, and
spaces of class names are ignored. Further classes are kept for class lists that name them later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dear.errors import DataError, InputError
from dear.utils.files import read_mapping
from dear.utils.text import check_name, check_printable, fill_template, fold_name

MAX_CHARACTERS = 2000  #: of a text
_NAME_WORDS = 3  # an entry without a full stop that has more words is a sentence
_END = (".", "!", "?")

Texts = dict[str, tuple[str, ...]]


def read_texts(source: str | os.PathLike[str] | Mapping[str, Any]) -> Texts:
    """Entries by class, checked, as they are written.

    Args:
        source: a JSON file, or a mapping from class to a text or a list of texts.

    Raises:
        DataError: names the file and the class whose entries are not texts.

    >>> read_texts({"cat": "kitty"})
    {'cat': ('kitty',)}
    """
    name_of_source, content = read_mapping(source, "texts", example="{'cat': ['kitty']}")
    return {str(name): check_texts(entries, str(name), name_of_source) for name, entries in content.items()}


def check_texts(entries: Any, name: str, source: str) -> tuple[str, ...]:
    """The different entries of one class, in their order."""
    texts = [entries] if isinstance(entries, str) else entries
    if not isinstance(texts, Sequence) or not texts:
        raise DataError(f"{source}: the class {name!r} needs a list of texts, got {str(entries)[:80]!r}")
    for number, entry in enumerate(texts, 1):
        if not isinstance(entry, str) or not entry.strip() or len(entry) > MAX_CHARACTERS:
            raise DataError(
                f"{source}: text {number} of the class {name!r} must be 1 to {MAX_CHARACTERS} characters, "
                f"got {str(entry)[:80]!r}"
            )
    try:
        check_name(name)
        return tuple(dict.fromkeys(check_printable(" ".join(entry.split()), "text") for entry in texts))
    except InputError as error:
        raise DataError(f"{source}: {error}") from None


def resolve_texts(texts: Mapping[str, Sequence[str]], classes: Sequence[str], template: str) -> Texts:
    """Sentences by class, with the spelling of `classes`.

    Raises:
        DataError: names the classes without texts.

    >>> resolve_texts({"Tabby_cat": ["kitty", "It has stripes."], "fox": ["fox"]}, ["tabby cat"], "a {}.")
    {'tabby cat': ('a kitty.', 'It has stripes.'), 'fox': ('a fox.',)}
    """
    known = {fold_name(name): name for name in classes}
    resolved: Texts = {}
    for written, entries in texts.items():
        name = known.get(fold_name(written), written)
        if name in resolved:
            raise DataError(f"texts: the class {name!r} has two entries, one is {written!r}; merge them")
        resolved[name] = tuple(
            fill_template(template, entry) if _is_name(entry) else entry for entry in entries
        )
    missing = [name for name in classes if name not in resolved and "|" not in name]
    if missing:
        names = ", ".join(map(repr, missing[:5])) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        raise DataError(f"texts: the class {names} has no texts; add some, or its name")
    return resolved


def _is_name(entry: str) -> bool:
    return len(entry.split()) <= _NAME_WORDS and not entry.endswith(_END)
