"""A corpus in the words of the attribute world, for a text tower that was trained on its captions alone.

Its phrases are the world's caption wordings that name one factor and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from dear.heads.corpus.build import Phrase, article
from dear.world import factors as F
from dear.world.templates import SLOTS, TEMPLATES, WORDS

_FACTOR_CONCEPT = {
    F.COLOR: "Color",
    F.TEXTURE: "Texture",
    F.PLACE: "Location",
    F.STYLE: "Style",
    F.COUNT: "Number",
}
_SUBJECT_CONCEPT = {
    F.SHAPE: "Shape",
    F.OBJECT: "Object",
    F.VEHICLE: "Object",
    F.ANIMAL: "Animal",
    F.PERSON: "Action",  # the world's people differ in what they do, its faces in what they feel
    F.FACE: "Emotion",
    F.LETTER: "Text",
    F.DIGIT: "Number",
    F.SURFACE: "Texture",
    F.VIEW: "Location",
}
_KIND_CONCEPT = _SUBJECT_CONCEPT | {F.PERSON: "Human", F.FACE: "Human"}


def world_phrases() -> tuple[Phrase, ...]:
    """About 1,200 phrases over the twelve concepts, each naming one factor of the world.

    >>> {phrase.text: phrase.concept for phrase in world_phrases()}["something striped"]
    'Texture'
    """
    seen: dict[str, Phrase] = {}
    for text, concept in _wordings():
        seen.setdefault(text, Phrase(text, concept, "world"))
    return tuple(seen.values())


def _wordings() -> Iterator[tuple[str, str]]:
    """(phrase, concept) of every wording that names one factor, repeats included."""
    for template in TEMPLATES:
        if len(template.slots) != 1 or template.text.startswith(("the {subject", "this is", "there is")):
            continue
        slot = template.slots[0]
        factor = SLOTS[slot]
        for value, words in enumerate(WORDS[slot]):
            concept = _concept(factor, value)
            if factor == F.SUBJECT and F.SUBJECT_KIND[value] not in template.kinds:
                continue
            if factor == F.COUNT and template.multiple is not None and template.multiple != (value > 0):
                continue
            for word in words:
                text = template.text.replace(f"{{a}} {{{slot}}}", article(word)).replace(f"{{{slot}}}", word)
                yield text.removesuffix("."), concept


def _concept(factor: int, value: int) -> str:
    if factor == F.SUBJECT:
        return _SUBJECT_CONCEPT[F.SUBJECT_KIND[value]]
    if factor == F.KIND:
        return _KIND_CONCEPT[value]
    return _FACTOR_CONCEPT[factor]
