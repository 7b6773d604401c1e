"""Opening a corpus by name, or from a user's file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dear.errors import DearError, InputError
from dear.heads.corpus.build import Phrase, general_phrases
from dear.utils.files import read_text
from dear.utils.schema import Strict, decode
from dear.utils.text import first_unprintable

_MOST_PHRASES = 200_000
_LONGEST_CONCEPT = 80  # as in a role map
_LONGEST = 400  # characters; CLIP reads about 75 tokens


@dataclass(frozen=True)
class Corpus:
    """Different phrases, in a fixed order, with the concepts they were written for where known."""

    name: str
    phrases: tuple[Phrase, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """The phrases' wordings."""
        return tuple(phrase.text for phrase in self.phrases)

    @property
    def tags(self) -> dict[str, str]:
        """Concept of each phrase that has one."""
        return {phrase.text: phrase.concept for phrase in self.phrases if phrase.concept is not None}

    def counts(self) -> dict[str, int]:
        """Number of phrases per concept, largest first; phrases without a concept under ""."""
        counts = Counter(phrase.concept or "" for phrase in self.phrases)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def __len__(self) -> int:
        """Number of phrases."""
        return len(self.phrases)


def load_corpus(name: str | os.PathLike[str] = "general") -> Corpus:
    """A corpus: "general" (the default), "world" (the attribute world's words), or a file.

    A `.txt` file holds one phrase per line, optionally followed by a tab and its concept; a `.jsonl` file
    holds one object per line: `{"phrase": "…", "concept": "…"}`, `concept` optional. Empty lines and repeated
    phrases are skipped.

    >>> corpus = load_corpus("general")
    >>> len(corpus) > 3400, corpus.tags["a photo taken in Albania"]
    (True, 'Location')
    """
    if str(name) == "general":
        return Corpus("general", general_phrases())
    if str(name) == "world":
        from dear.heads.corpus.world import world_phrases

        return Corpus("world", world_phrases())
    path = Path(name)
    if path.suffix not in (".txt", ".jsonl"):
        raise InputError(f"{name}: a corpus is 'general', 'world', or a .txt or .jsonl file of phrases")
    try:
        text = read_text(path, "corpus")
    except DearError as error:
        raise InputError(str(error)) from error
    seen: dict[str, Phrase] = {}
    for phrase in _lines(text, path):
        seen.setdefault(phrase.text, phrase)
    if not 0 < len(seen) <= _MOST_PHRASES:
        raise InputError(f"{path}: a corpus must have 1 to {_MOST_PHRASES:,} phrases, got {len(seen):,}")
    return Corpus(path.stem, tuple(seen.values()))


class _Entry(Strict, frozen=True):
    phrase: str
    concept: str | None = None


def _lines(text: str, path: Path) -> Iterator[Phrase]:
    """The phrases of a user's file, checked line by line."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            phrase, _, concept = line.partition("\t")
        else:
            try:
                entry = decode(line, _Entry, f"{path}, line {number}", "corpus line")
            except DearError as error:
                raise InputError(str(error)) from None
            phrase, concept = entry.phrase, entry.concept or ""
        if not phrase.strip() or len(phrase) > _LONGEST:
            raise InputError(f"{path}, line {number}: needs a phrase of 1 to {_LONGEST} characters")
        phrase, concept = phrase.strip(), concept.strip()
        if len(concept) > _LONGEST_CONCEPT or first_unprintable(phrase) or first_unprintable(concept):
            raise InputError(
                f"{path}, line {number}: holds a control character, or a concept of more than "
                f"{_LONGEST_CONCEPT} characters"
            )
        yield Phrase(phrase, concept or None)
