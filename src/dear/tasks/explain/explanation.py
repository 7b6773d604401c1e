"""Explanations: bars that sum to the score, answers without a part of the model, and a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from PIL import Image
from torch import Tensor

from dear.data.images import ImageSet, label_text
from dear.utils.files import PathLike, write_atomic

if TYPE_CHECKING:
    import pandas as pd

MLPS, FIXED, AVERAGE, UNKNOWN = (
    "MLPs",
    "Biases and class token",
    "Average training image",
    "Not decomposed",
)
THRESHOLD = "Threshold"  #: of several labels: what the score of a label is compared with
MOST = 0.5  #: share of what speaks for the answer from which on a part is called the main reason
LARGE_SHARE = 0.25  #: share of the lead that depends on a concept, from which on the concept is named


@dataclass(frozen=True)
class Bar:
    """A part of the score of the class and of the one it is compared with, above the mean of all classes.

    With reference images, the part is relative to its mean over them, and what remains for an average image
    is a separate bar.
    """

    name: str
    kind: str  #: "role", "layer", "heads", "token", "average" or "rest"
    answer: float
    other: float

    @property
    def lead(self) -> float:
        """What it adds to the lead of the answer over the other class."""
        return self.answer - self.other

    @property
    def words(self) -> str:
        """The part in words, as in "mostly by …"."""
        match self.kind:
            case "role":
                return f"the heads for {self.name}"
            case "layer":
                return f"the heads of {self.name.lower()}"
            case "heads":
                return f"the {self.name.lower()}"
            case "token":
                name = self.name.removeprefix("Token ")
                return "the learned tokens" if name == self.name else f"the learned token for {name}"
            case "average":
                return "what any image gets"
        return {
            MLPS: "the MLPs, the parts of the layers outside the heads",
            FIXED: "terms that are the same for all images",
            THRESHOLD: "the threshold of the label",
            UNKNOWN: "the comparison with training images, which cannot be decomposed",
        }.get(self.name, f"the {self.name[:1].lower()}{self.name[1:]}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {"answer": round(self.answer, 6), "against": round(self.other, 6)}
        return {"name": self.name, "kind": self.kind, **values}


@dataclass(frozen=True)
class HeadPart:
    """One head's part, on the scale of the bars."""

    layer: int  #: counted from 1
    head: int  #: counted from 0
    group: str
    answer: float
    other: float
    phrases: tuple[str, ...]  #: empty where the role map is close to chance


@dataclass(frozen=True)
class Counterfactual:
    """The prediction without a group of heads or a concept."""

    name: str  #: of a group of heads, or of a concept
    lead_drop: float  #: drop of the lead over the other class
    drop_beyond_chance: float  #: the same beyond what as many random directions would take on average
    answer: str
    probability: float
    value: str = ""  #: of a concept: the word nearest to the image
    heads: int = 0  #: number of heads left out

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        value: dict[str, Any] = {"value": self.value} if self.value else {}
        return {
            "name": self.name,
            "lead_drop": round(self.lead_drop, 6),
            "drop_beyond_chance": round(self.drop_beyond_chance, 6),
            "answer": self.answer,
            "probability": round(self.probability, 6),
            "heads": self.heads,
            **value,
        }


@dataclass(frozen=True)
class Neighbor:
    """A reference image."""

    images: ImageSet
    place: int

    @property
    def label(self) -> str:
        """Its class, or all of them."""
        return label_text(self.images, self.place)

    @property
    def image(self) -> Image.Image:
        """The image, read now."""
        return self.images.image(self.place)


@dataclass(frozen=True)
class Explanation:
    """Why one image is answered as it is: the bars sum to `scores`, for the class and for the other."""

    image: str
    view: Image.Image  #: what the model sees of the image
    answer: str  #: the class that is explained
    other: str  #: the class it is compared with
    probabilities: tuple[tuple[str, float], ...]  #: likeliest first
    scores: tuple[float, float]  #: calibrated logits of both, above the mean of all classes
    bars: tuple[Bar, ...]
    head_parts: Tensor  #: [2, L, H], of both scores: the heads of a group sum to its bar
    heads: tuple[HeadPart, ...]  #: the most influential ones
    #: by group of heads and by token: [2, S, S], its bars by patch; "" for all of them, spread a little
    maps: Mapping[str, Tensor]
    without_heads: tuple[Counterfactual, ...] = ()
    without_concepts: tuple[Counterfactual, ...] = ()  #: the concept that the answer depends on most, first
    neighbors: tuple[Neighbor, ...] = ()  #: reference images most alike in the heads that decide
    exact: float = 1.0  #: share of the parts that is decomposed exactly
    notices: tuple[str, ...] = ()
    labels: tuple[str, ...] | None = None  #: all answered labels, where images have several
    threshold: float | None = None  #: then: the probability from which the image has the label

    @property
    def predicted(self) -> str:
        """What the model answers: a class; of several labels whether the explained one is among them."""
        if self.labels is None:
            return self.probabilities[0][0]
        return label_or_not(self.answer, self.answer in self.labels)

    @property
    def lead(self) -> float:
        """Difference of the two scores."""
        return self.scores[0] - self.scores[1]

    @property
    def sentence(self) -> str:
        """The explanation in words; it names what carries the largest share of the lead."""
        sure = dict(self.probabilities)
        if self.threshold is not None:
            has = "Has" if self.answer in (self.labels or ()) else "Does not have"
            likely = f"{sure[self.answer]:.1%}; from {self.threshold:.1%} on"
            return f"{has} the label {self.answer} ({likely}), {self._reason()}{self._dependence()}"
        first, second = (f"{name} ({sure[name]:.1%})" for name in (self.answer, self.other))
        if self.answer == self.probabilities[0][0]:
            text = f"Answered {first} rather than {second}"
        else:
            text = f"The answer is {self.probabilities[0][0]}; compared are {first} and {second}"
        return f"{text}, {self._reason()}{self._dependence()}"

    def _reason(self) -> str:
        """The part that carries most of the lead, or the largest of several."""
        ahead = 1 if self.lead >= 0 else -1
        top = max((bar for bar in self.bars if bar.name != THRESHOLD), key=lambda bar: ahead * bar.lead)
        support = sum(max(0.0, ahead * bar.lead) for bar in self.bars)
        share = f"({top.lead:+.2f}; all parts sum to the lead of {self.lead:+.2f})"
        if support <= 0 or ahead * top.lead < MOST * support:
            return f"by several parts; the largest is {top.words} {share}."
        return f"mostly by {top.words} {share}."

    def _dependence(self) -> str:
        """What happens without the concept that the answer depends on most, where that is much."""
        concept = next(iter(self.without_concepts), None)
        if concept is None or concept.drop_beyond_chance < LARGE_SHARE * abs(self.lead):
            return ""
        same = "stays" if concept.answer == self.predicted else "becomes"
        return (
            f" Without {concept.name} ({concept.value}) the answer {same} {concept.answer} "
            f"({concept.probability:.1%})."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the maps."""
        return {
            "image": self.image,
            "answer": self.answer,
            "against": self.other,
            "probabilities": {name: round(p, 6) for name, p in self.probabilities},
            **({} if self.labels is None else {"labels": list(self.labels), "threshold": self.threshold}),
            "scores": [round(score, 6) for score in self.scores],
            "lead": round(self.lead, 6),
            "sentence": self.sentence,
            "bars": [bar.to_dict() for bar in self.bars],
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
            "without_heads": [one.to_dict() for one in self.without_heads],
            "without_concepts": [one.to_dict() for one in self.without_concepts],
            "exact_share": round(self.exact, 4),
            "notices": list(self.notices),
        }


@dataclass(frozen=True, repr=False)
class Explanations(Sequence[Explanation]):
    """Explanations of some images by one model.

    Renders as a page in notebooks. `to_frame` is the bars as a table, `write_page` the page as a file.
    """

    items: tuple[Explanation, ...]
    method: str  #: title of the method
    notes: Mapping[str, str]  #: how the explanations were made

    def __repr__(self) -> str:
        return f"<Explanations: {len(self)} images by {self.method}>"

    @overload
    def __getitem__(self, place: int) -> Explanation: ...
    @overload
    def __getitem__(self, place: slice) -> Explanations: ...
    def __getitem__(self, place: int | slice) -> Explanation | Explanations:
        if isinstance(place, slice):
            return Explanations(self.items[place], self.method, self.notes)
        return self.items[place]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Explanation]:
        return iter(self.items)

    @property
    def notices(self) -> tuple[str, ...]:
        """What a reader should know, each once."""
        return tuple(dict.fromkeys(notice for one in self for notice in one.notices))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the maps."""
        return {"images": [one.to_dict() for one in self]}

    def to_frame(self) -> pd.DataFrame:
        """One row per image and part: its share of both scores and of the lead. Needs pandas."""
        import pandas as pd

        rows = [
            {
                "image": one.image,
                "answer": one.answer,
                "against": one.other,
                "part": bar.name,
                "kind": bar.kind,
                "answer_score": bar.answer,
                "against_score": bar.other,
                "lead": bar.lead,
            }
            for one in self
            for bar in one.bars
        ]
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        from dear.report.page import iframe  # plotly, which a service does not need
        from dear.tasks.explain.page import explanations_page

        return iframe(explanations_page(self))

    def write_page(self, path: PathLike) -> None:
        """Write the page to a file, whole or not at all."""
        from dear.tasks.explain.page import explanations_page

        write_atomic(path, explanations_page(self))


def label_or_not(name: str, has: bool) -> str:
    """An answer about one label."""
    return name if has else f"not {name}"
