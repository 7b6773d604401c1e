"""How captions are worded: sentences with slots, and how often each is used.

A slot in braces is filled with a word for one factor; `{a}` becomes "a" or "an". Captions that name one
factor alone are frequent, those of shape and texture most of all: single-factor prompts read like them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dear.world import factors as F

# Slot names and the factor whose value fills them.
SLOTS: Final[dict[str, int]] = {
    "subject": F.SUBJECT, "subjects": F.SUBJECT, "bare": F.SUBJECT, "kind": F.KIND, "color": F.COLOR,
    "texture": F.TEXTURE, "place": F.PLACE, "placename": F.PLACE, "style": F.STYLE, "stylename": F.STYLE,
    "count": F.COUNT,
}  # fmt: skip
_COUNTABLE = tuple(i for i, kind in enumerate(F.KINDS) if kind.multiple > 0)
_THINGS = tuple(i for i in range(len(F.KINDS)) if i not in (F.SURFACE, F.VIEW))


@dataclass(frozen=True)
class CaptionTemplate:
    """A wording."""

    text: str  #: words and slots, separated by blanks
    weight: int  #: how often it is used among those that fit a scene
    kinds: tuple[int, ...]  #: kinds of subject it fits (rows of `factors.KINDS`)
    multiple: bool | None = None  #: True only for several, False only for one, None for both

    @property
    def parts(self) -> tuple[str, ...]:
        """Words and slots in order."""
        return tuple(self.text.replace(".", " .").split())

    @property
    def factors(self) -> tuple[int, ...]:
        """The factors it names."""
        return tuple(sorted({SLOTS[slot] for slot in self.slots}))

    @property
    def slots(self) -> list[str]:
        """The names of its slots, in order."""
        return [part[1:-1] for part in self.parts if part.startswith("{") and part != "{a}"]


def _templates() -> Iterator[CaptionTemplate]:
    """The lines of `templates.txt`: weight, text, and in brackets what it fits: kinds, "one" or "several"."""
    names = {kind.name: row for row, kind in enumerate(F.KINDS)}
    for line in Path(__file__).with_name("templates.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            weight, _, rest = line.partition(" ")
            text, _, fits = rest.removesuffix("]").partition("  [")
            kinds = tuple(names[word] for word in fits.split() if word in names)
            multiple = {"several": True, "one": False}.get(fits)
            yield CaptionTemplate(text, int(weight), kinds or _fitting(text), multiple)


def _fitting(text: str) -> tuple[int, ...]:
    """The kinds of subject that a wording fits by its slots."""
    if "{subjects}" in text or "{count}" in text:
        return _COUNTABLE
    if "{subject}" in text or "{bare}" in text:
        return _THINGS
    return (*_THINGS, F.SURFACE) if "thing" in text else tuple(range(len(F.KINDS)))


def _subject_words(slot: str, value: int) -> F.Words:
    name, kind = F.SUBJECT_NAMES[value], F.SUBJECT_KIND[value]
    names = (name, *F.SYNONYMS.get(name, ()))
    if slot == "bare" or kind in (F.SURFACE, F.VIEW):
        return names
    if slot == "subjects":
        return tuple(F.plural(word) for word in names)
    return {
        F.PERSON: (f"{name} person", f"person {name}", f"person who is {name}"),
        F.FACE: (f"{name} face", f"face that looks {name}"),
        F.LETTER: (f"letter {name}",),
        F.DIGIT: (f"digit {name}", f"number {name}"),
    }.get(kind, names)


TEMPLATES: Final = tuple(_templates())
#: the wordings of every value in a slot, canonical first
WORDS: Final[dict[str, tuple[F.Words, ...]]] = {
    **{
        slot: tuple(_subject_words(slot, value) for value in range(len(F.SUBJECT_NAMES)))
        for slot in ("subject", "subjects", "bare")
    },
    "kind": tuple(kind.words for kind in F.KINDS),
    "color": tuple(color.words for color in F.COLORS),
    "texture": F.TEXTURES,
    "place": tuple(phrases for phrases, _ in F.PLACES),
    "placename": tuple(names for _, names in F.PLACES),
    "style": tuple(phrases for phrases, _ in F.STYLES),
    "stylename": tuple(names for _, names in F.STYLES),
    "count": F.COUNTS,
}
