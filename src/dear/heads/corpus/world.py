"""A corpus in the words of the attribute world, for a text tower that was raised on its captions alone."""

from __future__ import annotations

from collections.abc import Iterator

from dear.data.world import factors
from dear.heads.corpus.build import Phrase, article

_THINGS = ("shape", "object", "vehicle", "animal", "thing", "figure")
_BARE = ("a photo of {}", "{}", "a sketch of {}", "a painting of {}", "a cartoon of {}")


def world() -> tuple[Phrase, ...]:
    """About 900 phrases over the twelve concepts, each naming one factor of the world and nothing else."""
    seen: dict[str, Phrase] = {}
    for concept, text in _all():
        seen.setdefault(text, Phrase(text, concept, "world"))
    return tuple(seen.values())


def _all() -> Iterator[tuple[str, str]]:
    """(concept, phrase), repeats included."""
    for colour in factors.COLOURS:
        for word in colour.words:
            for thing in (*_THINGS, "letter", "digit", "surface"):
                yield "Color", article(f"{word} {thing}")
            yield "Color", word
    for words in factors.TEXTURES:
        for word in words:
            for thing in ("surface", "pattern", "material", *_THINGS):
                yield "Texture", article(f"{word} {thing}")
            yield "Texture", word
    for phrases, names in factors.PLACES:
        for phrase in phrases:
            yield "Location", phrase
            for thing in ("object", "thing", "figure", "shape"):
                yield "Location", f"{article(thing)} {phrase}"
        for name in names:
            yield "Location", name
            yield "Location", f"a view of the {name}"
    for phrases, names in factors.STYLES:
        for phrase in phrases:
            for thing in ("thing", "figure", "object", "shape", "animal", "vehicle"):
                yield "Style", f"{phrase} {article(thing)}"
        for name in names:
            yield "Style", article(name)
    for names, concept in (
        (factors.SHAPES, "Shape"),
        (factors.OBJECTS, "Object"),
        (factors.VEHICLES, "Object"),
        (factors.ANIMALS, "Animal"),
    ):
        for name in names:
            for word in (name, *factors.SYNONYMS.get(name, ())):
                for wording in _BARE:
                    yield concept, wording.format(article(word))
    for letter in factors.LETTERS:
        for wording in _BARE[:3]:
            yield "Text", wording.format(f"the letter {letter}")
    for digit in factors.DIGITS:
        for name in ("digit", "number"):
            for wording in _BARE[:3]:
                yield "Number", wording.format(f"the {name} {digit}")
    for words in factors.COUNTS[1:]:
        for word in words:
            for thing in ("shapes", "objects", "vehicles", "animals", "things", "figures"):
                yield "Number", f"{word} {thing}"
    for action in factors.ACTIONS:
        for word in (action, *factors.SYNONYMS.get(action, ())):
            for person in ("a person", "a human"):
                yield "Action", f"{person} {word}"
            yield "Action", word
    for emotion in factors.EMOTIONS:
        for word in (emotion, *factors.SYNONYMS.get(emotion, ())):
            yield "Emotion", article(f"{word} face")
            yield "Emotion", word
    for wording in _BARE:
        for word in ("a person", "a human", "a face"):
            yield "Human", wording.format(word)
