"""What an explanation says: bars that sum to the score, answers without something, and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Bar:
    """A part of the score, for the class and for the one it is compared with, above the mean of all."""

    name: str
    kind: str  #: "role", "layer", "heads", "token" or "rest"
    answer: float
    other: float

    @property
    def decides(self) -> float:
        """What it adds to the difference of the two."""
        return self.answer - self.other

    def facts(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {"answer": round(self.answer, 6), "against": round(self.other, 6)}
        return {"name": self.name, "kind": self.kind, **values}


@dataclass(frozen=True)
class HeadPart:
    """One head's part."""

    layer: int  #: counted from 1
    head: int  #: counted from 0
    group: str
    answer: float
    other: float
    phrases: tuple[str, ...]


@dataclass(frozen=True)
class Otherwise:
    """The answer without something."""

    name: str  #: of a group of heads, or of a concept
    lost: float  #: of the difference between the two classes
    beyond: float  #: the same beyond what as many random directions would take on average
    answer: str
    probability: float
    value: str = ""  #: of a concept: the word nearest to the image
    heads: int = 0  #: how many are left out


@dataclass(frozen=True)
class Explanation:
    """Why one image is answered as it is: the bars sum to `score`, for the class and for the other."""

    image: str
    answer: str  #: the class that is explained
    other: str  #: the class it is compared with
    probabilities: tuple[tuple[str, float], ...]  #: likeliest first
    scores: tuple[float, float]  #: of both, above the mean of all classes
    bars: tuple[Bar, ...]
    heads: tuple[HeadPart, ...]  #: the most telling ones
    #: by group, and "" for all heads (spread a little): [2, S, S], parts of both scores by patch
    maps: Mapping[str, Tensor]
    roles: tuple[Otherwise, ...] = ()  #: answers without the heads of a group
    concepts: tuple[Otherwise, ...] = ()  #: answers without a concept; what the answer rests on most, first
    neighbors: tuple[int, ...] = ()  #: reference images most alike in the heads that decide
    exact: float = 1.0  #: share of the parts that is taken apart exactly
    notices: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The explanation in words."""
        sure = dict(self.probabilities)
        text = f"Answered {self.answer} ({_percent(sure[self.answer])}) rather than {self.other}"
        if self.answer != self.probabilities[0][0]:
            text = (
                f"The answer is {self.probabilities[0][0]}; {self.answer} ({_percent(sure[self.answer])}) is"
            )
            text += f" compared with {self.other}"
        first = next((c for c in self.concepts if c.beyond > 0), None)
        if first is not None:
            text += f", mostly by {first.name} ({first.value})."
            same = first.answer == self.answer
            without = "stays" if same else "would be"
            text += (
                f" Without {first.name} the answer {without} {first.answer} ({_percent(first.probability)})."
            )
            return text
        bar = max((bar for bar in self.bars if bar.kind != "rest"), key=lambda b: b.decides)
        return f"{text}, mostly by {bar.name}."

    def facts(self) -> dict[str, Any]:
        """Plain values for JSON, without the maps."""
        return {
            "image": self.image,
            "answer": self.answer,
            "against": self.other,
            "probabilities": {name: round(p, 6) for name, p in self.probabilities},
            "scores": [round(score, 6) for score in self.scores],
            "sentence": self.sentence,
            "bars": [bar.facts() for bar in self.bars],
            "heads": [
                {
                    "layer": h.layer,
                    "head": h.head,
                    "group": h.group,
                    "answer": round(h.answer, 6),
                    "against": round(h.other, 6),
                    "phrases": list(h.phrases[:5]),
                }
                for h in self.heads
            ],
            "without_heads": [_otherwise(o) for o in self.roles],
            "without_concepts": [_otherwise(o) for o in self.concepts],
            "exact_share": round(self.exact, 4),
            "notices": list(self.notices),
        }


def _otherwise(found: Otherwise) -> dict[str, Any]:
    known: dict[str, Any] = {"value": found.value} if found.value else {}
    return {
        "name": found.name,
        "lost": round(found.lost, 6),
        "beyond_chance": round(found.beyond, 6),
        "answer": found.answer,
        "probability": round(found.probability, 6),
        "heads": found.heads,
        **known,
    }


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
