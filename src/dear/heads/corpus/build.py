"""From word lists to phrases: each word meets a few of its list's wordings, always the same ones.

A file of `words/` begins with its concept; a list begins with `[topic] n`, the number of wordings a word
gets; `- ` lines are the wordings, with {} for the word and {a} for the word with its article; the line
that begins with `: ` holds the words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

_HEADER = re.compile(r"\[(?P<topic>[^\]]+)\] (?P<count>\d+)")
_VOWEL_SOUND = re.compile(
    r"(?!u-shaped|unicycle|uniform|university|ukiyo|one\b)[aeiou]|hourglass|[x]-ray|s-shaped"
)


@dataclass(frozen=True)
class Phrase:
    """A phrase and the concept it was written for (None where the writer did not say)."""

    text: str
    concept: str | None = None
    topic: str | None = None


def article(word: str) -> str:
    """The word with a or an before it.

    >>> article("owl"), article("uniform"), article("s-shaped")
    ('an owl', 'a uniform', 'an s-shaped')
    """
    return f"an {word}" if _VOWEL_SOUND.match(word.lower()) else f"a {word}"


def phrases_of(text: str) -> Iterator[Phrase]:
    """All phrases of one word file's text, in its order."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    concept, topic, count = lines[0], "", 1
    wordings: list[str] = []
    for line in lines[1:]:
        header = _HEADER.fullmatch(line)
        if header:
            topic, count, wordings = header["topic"], int(header["count"]), []
        elif line.startswith("- "):
            wordings.append(line[2:])
        else:
            for number, word in enumerate(line.removeprefix(": ").split(", ")):
                for turn in range(count):
                    # Wordings take turns, so that neighbors in the list read differently.
                    wording = wordings[(number + turn * max(1, len(wordings) // count)) % len(wordings)]
                    yield Phrase(wording.replace("{a}", article(word)).replace("{}", word), concept, topic)


def general_phrases() -> tuple[Phrase, ...]:
    """The project's corpus: about 3,500 different phrases over fifteen concepts."""
    folder = resources.files("dear.heads.corpus").joinpath("words")
    seen: dict[str, Phrase] = {}
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".txt"):
            for phrase in phrases_of(file.read_text(encoding="utf-8")):
                seen.setdefault(phrase.text.lower(), phrase)
    return tuple(seen.values())
