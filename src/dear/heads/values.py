"""A concept and its values in words: Location is beach, forest, street … The words lie in `values.json`.

A user names a concept of the twelve ("location", "background"), or one of their own with its values:
"background: lab bench, outdoors, conveyor belt".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dear._io.files import read_json
from dear._io.text import unprintable
from dear.clip.model import Clip
from dear.errors import UsageError
from dear.heads.names import CONCEPTS

_MOST_WORDS, _LONGEST = 64, 80
_OWN_TEMPLATES = ("{}", "a {}", "a photo of a {}.", "the {}")


@dataclass(frozen=True)
class Concept:
    """A concept q with its values q_1..q_K."""

    name: str  #: one of the twelve concepts, or the user's own word
    words: tuple[str, ...]  #: the values
    #: sentences around a value, with `{}`; the features of all are averaged
    templates: tuple[str, ...] = _OWN_TEMPLATES
    role: str | None = None  #: the concept of the heads that carry it, one of the twelve; None: none does


@lru_cache(maxsize=1)
def known_concepts() -> dict[str, Concept]:
    """The twelve concepts with their values, in the supplement's order.

    >>> known_concepts()["Location"].words[:3]
    ('beach', 'forest', 'desert')
    """
    table = read_json(Path(__file__).with_name("values.json"), "values of concepts")
    return {
        name: Concept(name, tuple(table[name]["words"]), tuple(table[name]["templates"]), name)
        for name in CONCEPTS
    }


@lru_cache(maxsize=1)
def _also() -> dict[str, str]:
    """Every name a concept goes by, in lower case."""
    table = read_json(Path(__file__).with_name("values.json"), "values of concepts")
    names = {other: name for name in CONCEPTS for other in table[name]["also"]}
    return names | {name.lower(): name for name in CONCEPTS}


def find_concept(text: str) -> Concept:
    """The concept that a user names: one of the twelve, or `name: value, value, …`.

    >>> find_concept("background").name
    'Location'
    >>> find_concept("background: lab bench, outdoors").words
    ('lab bench', 'outdoors')
    """
    name, colon, rest = text.partition(":")
    name = name.strip()
    known = _also().get(name.lower())
    if not colon:
        if known is None:
            raise UsageError(
                f"{text.strip()[:_LONGEST]!r} is none of the concepts {', '.join(CONCEPTS)}; name one of "
                'them, or your own with its values: "background: lab bench, outdoors"'
            )
        return known_concepts()[known]
    words = tuple(dict.fromkeys(word.strip() for word in rest.split(",") if word.strip()))
    if not name or len(words) < 2:
        raise UsageError(
            f'{text[:_LONGEST]!r}: a concept needs a name and two values: "lighting: day, night"'
        )
    if len(words) > _MOST_WORDS or any(len(word) > _LONGEST or unprintable(word) for word in (name, *words)):
        raise UsageError(
            f"the concept {name[:_LONGEST]!r}: at most {_MOST_WORDS} values, each of at most {_LONGEST} "
            "printable characters"
        )
    return Concept(name, words, _OWN_TEMPLATES, known)


def readable_words(clip: Clip, words: Sequence[str]) -> tuple[str, ...]:
    """The words that the text tower can tell apart; a reduced vocabulary reads all others as one token."""
    rows = clip.text.rows
    if rows is None or not words:
        return tuple(words)
    shared = int(rows.mode().values)
    ids = clip.tokenize(list(words)).to(rows.device)
    inside = (ids > 0) & (ids < int(ids.max()) - 1)  # the words' own tokens, not BOT, EOT and padding
    unknown = ((rows[ids] == shared) & inside).any(dim=1).tolist()
    return tuple(word for word, bad in zip(words, unknown, strict=True) if not bad)


@torch.no_grad()
def value_features(clip: Clip, concept: Concept) -> tuple[tuple[str, ...], Tensor]:
    """The values that the backbone can read, and T_q: their unit text features [K, E], float32 on the CPU."""
    words = readable_words(clip, concept.words)
    if len(words) < 2:
        raise UsageError(
            f"the concept {concept.name!r}: the backbone {clip.name} can read {len(words)} of its values "
            f"({', '.join(concept.words[:6])}); name at least two that it knows"
        )
    total = torch.zeros(len(words), clip.config.embed_dim)
    for template in concept.templates:
        features = clip.encode_text([template.replace("{}", word) for word in words]).float().cpu()
        total += F.normalize(features, dim=-1)
    return words, F.normalize(total, dim=-1)
