"""How captions are worded: sentences with slots, and how often each is used.

A slot in braces is filled with a word for one factor; `{a}` becomes "a" or "an". Captions that name one
factor alone are frequent, those of shape and texture most of all: single-factor prompts read like them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dear.world import factors as F

# Slot names and the factor whose value fills them.
SLOTS: Final[dict[str, int]] = {
    "subject": F.SUBJECT,
    "subjects": F.SUBJECT,
    "bare": F.SUBJECT,
    "kind": F.KIND,
    "color": F.COLOR,
    "texture": F.TEXTURE,
    "place": F.PLACE,
    "placename": F.PLACE,
    "style": F.STYLE,
    "stylename": F.STYLE,
    "count": F.COUNT,
}
_COUNTABLE = tuple(i for i, kind in enumerate(F.KINDS) if kind.many > 0)
_THINGS = tuple(i for i in range(len(F.KINDS)) if i not in (F.SURFACE, F.VIEW))


@dataclass(frozen=True)
class CaptionTemplate:
    """A wording."""

    text: str  #: words and slots, separated by blanks
    weight: int  #: how often it is used among those that fit a scene
    kinds: tuple[int, ...]  #: kinds of subject it fits (rows of `factors.KINDS`)
    many: bool | None = None  #: True only for several, False only for one, None for both

    @property
    def parts(self) -> tuple[str, ...]:
        """Words and slots in order."""
        return tuple(self.text.replace(".", " .").split())

    @property
    def named(self) -> tuple[int, ...]:
        """The factors it names."""
        return tuple(
            sorted({SLOTS[part[1:-1]] for part in self.parts if part.startswith("{") and part != "{a}"})
        )


def _template(
    text: str, weight: int, kinds: tuple[int, ...] | None = None, many: bool | None = None
) -> CaptionTemplate:
    if kinds is None:
        if "{subjects}" in text or "{count}" in text:
            kinds = _COUNTABLE
        elif "{subject}" in text or "{bare}" in text:
            kinds = _THINGS
        elif "thing" in text:
            kinds = (*_THINGS, F.SURFACE)
        else:
            kinds = tuple(range(len(F.KINDS)))
    return CaptionTemplate(text, weight, kinds, many)


TEMPLATES: Final = (
    # the subject alone
    _template("{a} {subject}", 12),
    _template("{a} {subject}.", 4),
    _template("the {subject}", 3),
    _template("{bare}", 5),
    _template("a picture of {a} {subject}.", 6),
    _template("an image of {a} {subject}", 3),
    _template("this is {a} {subject}.", 2),
    _template("there is {a} {subject}", 2),
    _template("{style} {a} {subject}.", 12),
    _template("{style} {a} {subject}", 4),
    _template("someone {bare}", 8, (F.PERSON,)),
    _template("a person who is {bare}", 4, (F.PERSON,)),
    _template("{a} {bare} expression", 5, (F.FACE,)),
    _template("someone feeling {bare}", 5, (F.FACE,)),
    _template("the text {bare}", 4, (F.LETTER, F.DIGIT)),
    # its texture alone
    _template("{texture}", 6),
    _template("{texture} texture.", 8),
    _template("{a} {texture} texture", 5),
    _template("{a} {texture} pattern", 5),
    _template("something {texture}", 5),
    _template("{a} {texture} thing", 4),
    _template("a picture of something {texture}.", 2),
    _template("{style} something {texture}.", 3),
    _template("{a} {texture} {kind}", 5),
    # its color alone
    _template("{color}", 4),
    _template("something {color}", 4),
    _template("{a} {color} thing", 3),
    _template("the color {color}", 2),
    _template("a picture of something {color}.", 2),
    _template("{style} something {color}.", 3),
    _template("{a} {color} {kind}", 4),
    # the place alone
    _template("{placename}", 2),
    _template("the {placename}", 2),
    _template("{place}", 2),
    _template("something {place}", 3),
    _template("a picture taken {place}", 3),
    _template("{style} the {placename}.", 4),
    _template("{style} something {place}.", 2),
    # the style alone
    _template("{stylename}", 3),
    _template("{a} {stylename}", 3),
    _template("{a} {stylename}.", 2),
    _template("{style} something", 3),
    # how many
    _template("{count} things", 7, many=True),
    _template("a picture of {count} things.", 4, many=True),
    _template("{count} {subjects}", 18, many=True),
    _template("{style} {count} {subjects}.", 8, many=True),
    _template("{count} {color} {subjects}", 10, many=True),
    _template("{count} {texture} {subjects}", 4, many=True),
    _template("{count} {texture} {color} {subjects}", 4, many=True),
    _template("{count} {subjects} {place}", 6, many=True),
    _template("{count} {color} {subjects} {place}", 4, many=True),
    _template("{count} thing", 1, many=False),
    _template("{count} {subject}", 3, many=False),
    # what kind of thing
    _template("{a} {kind}", 3),
    _template("{kind}", 1),
    _template("{style} {a} {kind}.", 2),
    _template("{a} {kind} {place}", 2),
    # two factors
    _template("{a} {color} {subject}", 9),
    _template("{style} {a} {color} {subject}.", 6),
    _template("{a} {texture} {subject}", 9),
    _template("{style} {a} {texture} {subject}.", 6),
    _template("{a} {subject} {place}", 8),
    _template("{style} {a} {subject} {place}.", 5),
    _template("{a} {texture} {color} thing", 4),
    _template("{a} {texture} {color} {kind}", 3),
    _template("something {texture} and {color}", 3),
    _template("something {color} {place}", 3),
    _template("something {texture} {place}", 3),
    # nearly all, and all
    _template("{a} {texture} {color} {subject}", 8),
    _template("{a} {color} {texture} {subject}.", 4),
    _template("{style} {a} {texture} {color} {subject}.", 4),
    _template("{a} {color} {subject} {place}", 5),
    _template("{a} {texture} {subject} {place}", 5),
    _template("{a} {texture} {color} {subject} {place}", 10),
    _template("{style} {a} {texture} {color} {subject} {place}.", 10),
    _template("{style} {a} {color} {subject} {place}.", 4),
)


def phrases(slot: str, value: int) -> tuple[str, ...]:
    """The wordings of a value in a slot, canonical first.

    >>> phrases("subject", F.row("subject", "happy"))
    ('happy face', 'face that looks happy')
    """
    if slot == "color":
        return F.COLORS[value].words
    if slot == "texture":
        return F.TEXTURES[value]
    if slot == "kind":
        return F.KINDS[value].words
    if slot == "count":
        return F.COUNTS[value]
    if slot in ("place", "placename"):
        return F.PLACES[value][slot == "placename"]
    if slot in ("style", "stylename"):
        return F.STYLES[value][slot == "stylename"]
    return _subject_phrases(slot, value)


def _subject_phrases(slot: str, value: int) -> tuple[str, ...]:
    name, kind = F.SUBJECT_NAMES[value], F.SUBJECT_KIND[value]
    names = (name, *F.SYNONYMS.get(name, ()))
    if slot == "bare" or kind in (F.SURFACE, F.VIEW):
        return names
    if slot == "subjects":
        return tuple(F.plural(word) for word in names)
    if kind == F.PERSON:
        return (f"{name} person", f"person {name}", f"person who is {name}")
    if kind == F.FACE:
        return (f"{name} face", f"face that looks {name}")
    if kind == F.LETTER:
        return (f"letter {name}",)
    if kind == F.DIGIT:
        return (f"digit {name}", f"number {name}")
    return names


SLOT_SIZES: Final[dict[int, int]] = {
    F.KIND: len(F.KINDS),
    F.SUBJECT: len(F.SUBJECT_NAMES),
    F.COLOR: len(F.COLORS),
    F.TEXTURE: len(F.TEXTURES),
    F.PLACE: len(F.PLACES),
    F.COUNT: len(F.COUNTS),
    F.STYLE: len(F.STYLES),
}
