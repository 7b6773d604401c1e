"""A concept and its values in words: Location is beach, forest, street … The words are in `values.json`.

A user names a concept of the twelve ("location", "background"), or defines one by its values:
"background: lab bench, outdoors, conveyor belt".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.model import Clip
from dear.errors import UsageError
from dear.heads.names import CONCEPTS
from dear.utils.files import read_json
from dear.utils.text import first_unprintable, unknown_name

_MOST_WORDS, _LONGEST = 64, 80
TEMPLATES = ("{}", "a {}", "a photo of a {}.", "the {}")


@dataclass(frozen=True)
class Concept:
    """A concept q with its values q_1..q_K."""

    name: str  #: one of the twelve concepts, or the user's word
    words: tuple[str, ...]  #: the values
    #: sentences around a value, with `{}`; the features of all are averaged
    templates: tuple[str, ...] = TEMPLATES
    role: str | None = None  #: the concept of the heads that carry it, one of the twelve; None: none does


@lru_cache(maxsize=1)
def _table() -> Any:
    return read_json(Path(__file__).with_name("values.json"), "values of concepts")


@lru_cache(maxsize=1)
def known_concepts() -> dict[str, Concept]:
    """The twelve concepts with their values, in the supplement's order.

    >>> known_concepts()["Location"].words[:3]
    ('beach', 'forest', 'desert')
    """
    rows = ((name, _table()[name]) for name in CONCEPTS)
    return {name: Concept(name, tuple(row["words"]), tuple(row["templates"]), name) for name, row in rows}


def find_attribute(name: str, attributes: Iterable[str]) -> str:
    """The one of `attributes` that a user names, in any case, or by another word for its concept.

    Raises:
        UsageError: no attribute matches.

    >>> find_attribute("colour", ("Color", "Location")), find_attribute("Background", ("Color", "Location"))
    ('Color', 'Location')
    """
    names, word = tuple(attributes), name.strip().casefold()
    for wanted in (word, _concept_of(word)):
        for attribute in names if wanted else ():
            if attribute.casefold() == wanted:
                return attribute
    if not names:
        raise UsageError(f"no attribute is called {name.strip()[:_LONGEST]!r}; the role map has none")
    raise UsageError(unknown_name("attribute", name.strip()[:_LONGEST], names))


def _concept_of(word: str) -> str:
    """The concept, in lower case, that a word in lower case names or is a synonym of; empty if none."""
    names = (name for name in CONCEPTS if word in (name.lower(), *_table()[name]["also"]))
    return next(names, "").lower()


def find_concept(text: str) -> Concept:
    """The concept that a user names: one of the twelve, or `name: value, value, …`.

    >>> find_concept("background").name
    'Location'
    >>> find_concept("background: lab bench, outdoors").words
    ('lab bench', 'outdoors')
    """
    name, colon, rest = text.partition(":")
    name = name.strip()
    concept = _concept_of(name.lower())
    known = next((candidate for candidate in CONCEPTS if candidate.lower() == concept), None)
    if not colon:
        if known is None:
            raise UsageError(
                f"{text.strip()[:_LONGEST]!r} is none of the concepts {', '.join(CONCEPTS)}; name one of "
                'them, or define one by its values: "background: lab bench, outdoors"'
            )
        return known_concepts()[known]
    words = tuple(dict.fromkeys(word.strip() for word in rest.split(",") if word.strip()))
    if not name or len(words) < 2:
        raise UsageError(
            f'{text[:_LONGEST]!r}: a concept needs a name and two values: "lighting: day, night"'
        )
    if len(words) > _MOST_WORDS or any(
        len(word) > _LONGEST or first_unprintable(word) for word in (name, *words)
    ):
        raise UsageError(
            f"the concept {name[:_LONGEST]!r}: at most {_MOST_WORDS} values, each of at most {_LONGEST} "
            "printable characters"
        )
    return Concept(name, words, TEMPLATES, known)


def readable_words(clip: Clip, words: Sequence[str]) -> tuple[str, ...]:
    """The words that the text tower can distinguish; a reduced vocabulary maps all others to one token."""
    rows = clip.text.rows
    if rows is None or not words:
        return tuple(words)
    shared = int(rows.mode().values)
    ids = clip.tokenize(list(words)).to(rows.device)
    inside = (ids > 0) & (ids < int(ids.max()) - 1)  # the tokens of the words, not BOT, EOT and padding
    unknown = ((rows[ids] == shared) & inside).any(dim=1).tolist()
    return tuple(word for word, is_unknown in zip(words, unknown, strict=True) if not is_unknown)


def value_features(clip: Clip, concept: Concept) -> tuple[tuple[str, ...], Tensor]:
    """The values that the backbone can read, and T_q: their unit text features [K, E], float32 on the CPU."""
    words = readable_words(clip, concept.words)
    if len(words) < 2:
        raise UsageError(
            f"the concept {concept.name!r}: the backbone {clip.name} can read {len(words)} of its values "
            f"({', '.join(concept.words[:6])}); name at least two that it knows"
        )
    return words, word_features(clip, words, concept.templates)


@torch.no_grad()
def word_features(clip: Clip, words: Sequence[str], templates: Sequence[str] = TEMPLATES) -> Tensor:
    """Unit text features [K, E] of words, averaged over sentences around them, float32 on the CPU."""
    total = torch.zeros(len(words), clip.config.embed_dim)
    for template in templates:
        features = clip.encode_text([template.replace("{}", word) for word in words]).float().cpu()
        total += F.normalize(features, dim=-1)
    return F.normalize(total, dim=-1)
