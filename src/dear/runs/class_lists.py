"""Class lists as people write them, with one meaning in commands, files, requests, and the studio.

A list replaces the trained classes ("wolf, red fox"). If any of its names starts with `+`, at any position,
all its names are added to the trained classes: "+wolf, +red fox" and "wolf, +red fox" mean the same. A
trained name is kept once. Names are separated by commas or line breaks; a name with a comma is written in
double quotes ("fox, red"), a quote in it twice. In a file every line is one name, commas included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from dear.clip.tokenizer import clean
from dear.errors import UsageError
from dear.utils.text import check_name

ADD = "+"  #: before a name: the list adds to the trained classes
_BYTE_ORDER_MARK = "\ufeff"
_QUOTED = r'"((?:[^"]|"")*)"'
_ITEM = re.compile(rf"\s*(\+?)\s*(?:{_QUOTED}|([^,]*))\s*(?:,|\Z)")
_LINE = re.compile(rf"\s*(\+?)\s*(?:{_QUOTED}|(.*))\s*\Z")


def split_class_list(text: str) -> list[str]:
    r"""Names of a list with commas or line breaks between, each with its `+`; blank ones are left out.

    >>> split_class_list('wolf, +"fox, red",\n+ bear')
    ['wolf', '+fox, red', '+bear']
    """
    return _split(text, _ITEM)


def split_class_lines(text: str) -> list[str]:
    r"""Names of a file with one name per line, each with its `+`; blank lines are left out.

    >>> split_class_lines("\ufeff+wolf\r\n\r\nfox, red\r\n")
    ['+wolf', 'fox, red']
    """
    return _split(text, _LINE)


def _split(text: str, pattern: re.Pattern[str]) -> list[str]:
    names = []
    for line in text.removeprefix(_BYTE_ORDER_MARK).splitlines():
        for sign, quoted, plain in pattern.findall(line):
            name = sign + (quoted.replace('""', '"') or plain).strip()
            if name == ADD:
                raise UsageError(f"write the name of a class after the {ADD}, got {text.strip()[:80]!r}")
            if name:
                names.append(name)
    return names


def format_class_list(names: Sequence[str], separator: str = ", ") -> str:
    """The text that `split_class_list` reads as these names.

    >>> format_class_list(["wolf", "fox, red"])
    'wolf, "fox, red"'
    """
    return separator.join(_quote(name) for name in names)


def _quote(name: str) -> str:
    if not name.startswith(ADD) and '"' not in name and "," not in name:
        return name
    return '"' + name.replace('"', '""') + '"'


def resolve_classes(names: Sequence[str], trained: Sequence[str]) -> tuple[str, ...]:
    """The classes that a list means for a model with trained classes.

    Args:
        names: of `split_class_list`, `split_class_lines`, or a JSON list; a `+` before any of them adds all
            to the trained classes. A name that was trained with a `+` in it is that class.
        trained: classes of the model.

    Raises:
        UsageError: as `combine_classes`.

    >>> resolve_classes(["wolf", "+cat"], ["cat", "dog"]), resolve_classes(["wolf", "cat"], ["cat", "dog"])
    (('cat', 'dog', 'wolf'), ('wolf', 'cat'))
    """
    known = set(trained)
    plain, add = [], False
    for name in names:
        marked = name.startswith(ADD) and name not in known
        plain.append(name.removeprefix(ADD).strip() if marked else name.strip())
        add = add or marked
    return combine_classes(plain, trained, add=add)


def combine_classes(names: Sequence[str], trained: Sequence[str], *, add: bool = False) -> tuple[str, ...]:
    """These classes, or with `add` the trained classes followed by those of them that are new.

    Raises:
        UsageError: there is no name, one is listed twice, or two are the same words to CLIP, which ignores
            case and repeated spaces; also where only one of the two is listed and the other one is trained.
        InputError: a name is blank, too long, or has control characters.

    >>> combine_classes(["Cat"], ["cat", "dog"], add=True)
    Traceback (most recent call last):
    dear.errors.UsageError: the trained class 'cat' and 'Cat' are the same words to CLIP, ...
    """
    if not names:
        raise UsageError("the list names no class; write names separated by commas")
    readings = _readings(tuple(trained))
    listed: dict[str, str] = {}
    for name in map(check_name, names):
        reading = clean(name)
        if listed.get(reading) == name:
            raise UsageError(f"the class {name!r} is named twice; name it once")
        twin = readings.get(reading, listed.get(reading, name))
        if twin != name:
            kind = "trained class" if reading in readings else "class"
            raise UsageError(
                f"the {kind} {twin!r} and {name!r} are the same words to CLIP, which ignores case and "
                f"repeated spaces; keep {twin!r}"
            )
        listed[reading] = name
    if not add:
        return tuple(names)
    known = set(trained)
    return (*trained, *(name for name in names if name not in known))


@lru_cache(maxsize=16)
def _readings(trained: tuple[str, ...]) -> dict[str, str]:
    """Trained classes by the words that CLIP reads; cached for services, which need them repeatedly."""
    return {clean(name): name for name in trained}


def find_twins(names: Sequence[str]) -> tuple[str, str] | None:
    """The first two names that are equal or the same words to CLIP; None if all differ.

    >>> find_twins(["cat", "dog", "Cat"])
    ('cat', 'Cat')
    """
    readings: dict[str, str] = {}
    for index, name in enumerate(names):
        twin = readings.setdefault(clean(name), name)
        if len(readings) <= index:
            return twin, name
    return None
