"""Each class against the rest: which property of the images alone separates the class.

The score of a property is the area under the ROC curve (or its complement) with which it separates the images
of the class from all others. Natural classes reach 0.75 to 0.9; an edit of all images of one class reaches
0.98 to 1.00. Whether a model uses the property is tested by edits (`dear.shortcuts.causal`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import rankdata

from dear.errors import UsageError
from dear.heads.corpus.build import article
from dear.shortcuts.marks import Mark, Mask, common_patch, fixed_marks
from dear.shortcuts.properties import (
    CORNERS,
    PROPERTIES,
    Floats,
    ImageMeasurements,
    Property,
    property_column,
)

LIMIT = 0.95  #: minimum score of a finding
ENOUGH_IMAGES = 16  #: images per class; with fewer, high scores occur by chance, so the limit is higher
MIN_IMAGES = 8  #: classes with fewer images are not scored
FEW_CLASSES, FEW_LIMIT = 5, 0.98  #: with fewer classes, the other images are not varied enough
#: above their limits, from which on scores count as equal: one edit moves several properties
TIE_MARGIN = 0.01
CLOSE_MARGIN = 0.1  #: distance from its limit at which the closest property below it is mentioned

_LIMITS = {measure.name: measure.limit for measure in PROPERTIES}
_TITLES = {measure.name: measure.title for measure in PROPERTIES}
FILE_SIZE = Property("bytes per pixel", "strongly compressed", "weakly compressed")

#: of several findings with equal scores, the first one says most about what was done
_ORDER = (
    "mark", "brightness", "brightest pixels", "black tint", "green black tint", "green gray tint",
    "white tint", "saturation", "blocks", "sharpness", "aspect", "width", "contrast", "red", "blue",
    "vignette", "brightest corner", "darkest corner", "darkest pixels", "edge spread", "edge brightness",
    "edge red", "edge green", "edge blue", *(f"spot {name}" for name in CORNERS),
    "format", "camera", "JPEG tables", "bytes per pixel",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Shortcut:
    """A property that separates one class from all others, independent of the content of the images."""

    label: int
    class_name: str
    name: str  #: name of the property, "mark", or metadata of the files
    kind: str  #: the kind of edit, which `--without` removes; empty: a model cannot see the property
    score: float  #: 0.5 to 1
    look: str  #: appearance of the images of the class: "gray", "with black corners"
    #: medians of the class and of the others; None for marks and metadata in words
    values: tuple[float, float] | None = None
    mark: Mark | None = None
    also: tuple[str, ...] = ()  #: other properties above the limit in the same class

    @property
    def title(self) -> str:
        """The name of the property for people; of a mark, what `--without` takes ("frame")."""
        return self.kind or self.name if self.name == "mark" else _TITLES.get(self.name, self.name)

    @property
    def also_titles(self) -> tuple[str, ...]:
        """Names of the other properties for people; measures of the same thing count once."""
        titles = dict.fromkeys(_TITLES.get(name, name) for name in self.also)
        return tuple(title for title in titles if title != self.title)

    @property
    def clause(self) -> str:
        """The appearance as the end of a sentence: "are gray", "have black corners"."""
        return f"have {self.look[5:]}" if self.look.startswith("with ") else f"are {self.look}"

    @property
    def sentence(self) -> str:
        """The finding in words."""
        others = self.also_titles
        also = f" Other properties that separate them: {', '.join(others)}." if others else ""
        if self.mark is not None and self.mark.share < 1:
            share = f"{self.mark.share:.0%} of the images of {self.class_name}"
            return f"{share} {self.clause}, and hardly any other image does.{also}"
        score = f"separates them from all other images (score {self.score:.2f})"
        return f"Images of {self.class_name} {self.clause}: {self.title} alone {score}.{also}"

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "class": self.class_name,
            "property": self.title,
            "measure": self.name,
            "without": self.kind or None,
            "score": round(self.score, 4),
            "look": self.look,
            "class_median": None if self.values is None else round(self.values[0], 4),
            "others_median": None if self.values is None else round(self.values[1], 4),
            "place": None if self.mark is None else self.mark.place,
            "share": None if self.mark is None else self.mark.share,
            "also": list(self.also_titles),
        }


@dataclass(frozen=True, eq=False)
class Search:
    """Properties that separate classes from all others, and the one that comes closest to the limit."""

    shortcuts: tuple[Shortcut, ...]  #: one per class, the highest score first
    #: of the other classes; None: none comes within `CLOSE_MARGIN` of its limit
    closest: Shortcut | None = None
    closest_limit: float = LIMIT  #: the score it would need


def find_shortcuts(
    measured: ImageMeasurements, labels: Sequence[int], classes: Sequence[str]
) -> tuple[Shortcut, ...]:
    """The `shortcuts` of a `search_properties`."""
    return search_properties(measured, labels, classes).shortcuts


def search_properties(measured: ImageMeasurements, labels: Sequence[int], classes: Sequence[str]) -> Search:
    """Score every property of every class against all other images.

    The minimum score of a finding rises for few images or classes (`limit_for`).
    """
    label_array = np.asarray(labels, dtype=np.int64)
    if len(label_array) != len(measured):
        raise UsageError(f"labels must have one entry per image ({len(measured)}), got {len(label_array)}")
    counts = np.bincount(label_array, minlength=len(classes))
    present = int((counts > 0).sum())
    if present < 2:
        raise UsageError(f"comparing properties needs at least two classes with images, got {present}")
    numbers = _numbers(measured)
    ranks = rankdata(numbers, axis=0)
    marks = fixed_marks(measured.small, label_array, len(classes))
    above_limit, below = list[Shortcut](), list[tuple[float, Shortcut, float]]()
    for label, name in enumerate(classes):
        if counts[label] < MIN_IMAGES:
            continue

        def required(shortcut: Shortcut, count: int = int(counts[label])) -> float:
            return limit_for(count, present, min(LIMIT, _LIMITS.get(shortcut.name, LIMIT)))

        member, mark = label_array == label, marks[label]
        candidates = _numeric_scores(numbers, ranks, member, label, name)
        candidates += _file_scores(measured, member, label, name)
        candidates += [] if mark is None else [_mark(mark, label, name)]
        above = [shortcut for shortcut in candidates if shortcut.score >= required(shortcut)]
        if not any(shortcut.name == "mark" for shortcut in above):
            patch = common_patch(measured.small, member)
            above += [] if patch is None else [_mark(patch, label, name)]
        if above:
            first, *others = sorted(above, key=_sort_key)
            above_limit.append(replace(first, also=tuple(other.name for other in others)))
        else:
            nearest = min((s for s in candidates if s.kind), key=lambda s: required(s) - s.score)
            below.append((required(nearest) - nearest.score, nearest, required(nearest)))
    gap, closest, closest_limit = min(below, key=lambda entry: entry[0], default=(0.0, None, LIMIT))
    if gap > CLOSE_MARGIN:
        closest = None
    return Search(tuple(sorted(above_limit, key=lambda shortcut: -shortcut.score)), closest, closest_limit)


def limit_for(images: int, classes: int, limit: float = LIMIT) -> float:
    """The minimum score in a class with `images` images among `classes` classes; above 1: it is not scored.

    >>> limit_for(16, 10), limit_for(30, 3), limit_for(5, 10)
    (0.95, 0.98, 2.0)
    """
    if images < MIN_IMAGES:
        return 2.0
    raised = limit + (0.995 - limit) * max(0, ENOUGH_IMAGES - images) / (ENOUGH_IMAGES - MIN_IMAGES)
    return max(limit, raised, FEW_LIMIT if classes < FEW_CLASSES else 0.0)


def auc(values: Floats, members: Mask) -> float:
    """Probability that a value of the class (`members`, bool [n]) exceeds another one; ties count half."""
    return _area(rankdata(values), members)


def _area(ranks: Floats, members: Mask) -> float:
    count, others = int(members.sum()), int((~members).sum())
    return (float(ranks[members].sum()) - count * (count + 1) / 2) / (count * others)


def _numbers(measured: ImageMeasurements) -> Floats:
    """The properties of all images, and the size of their files where all have one, [n, P]."""
    files = [facts for facts in measured.files if facts is not None]
    if len(files) < len(measured):
        return measured.values
    return np.hstack((measured.values, np.array([[facts.bytes_per_pixel] for facts in files])))


def _numeric_scores(numbers: Floats, ranks: Floats, members: Mask, label: int, name: str) -> list[Shortcut]:
    scores = []
    for measure, values, value_ranks in zip((*PROPERTIES, FILE_SIZE), numbers.T, ranks.T, strict=False):
        area = _area(value_ranks, members)
        medians = (float(np.median(values[members])), float(np.median(values[~members])))
        look = measure.high if area >= 0.5 else measure.low
        if look:
            scores.append(
                Shortcut(label, name, measure.name, measure.edit, max(area, 1 - area), look, medians)
            )
    return scores


def _mark(mark: Mark, label: int, name: str) -> Shortcut:
    color = "" if mark.color == "mixed" else f"{mark.color} "
    if mark.place in ("background", "frame") or mark.place.startswith("corners"):
        description = f"{color}{mark.place}"
        look = f"with {description if mark.place.startswith('corners') else article(description)}"
        kind = "frame" if mark.place != "background" else "mark"
    else:
        look, kind = f"with the same {color}mark at the {mark.place}", "mark"
    return Shortcut(label, name, "mark", kind, mark.score, look, mark=mark)


def _file_scores(measured: ImageMeasurements, members: Mask, label: int, name: str) -> list[Shortcut]:
    """Metadata of files: does the most frequent value of the class separate it? Empty without files."""
    files = [facts for facts in measured.files if facts is not None]
    if len(files) < len(measured):
        return []
    scores = []
    for words, values in (
        ("format", [facts.format for facts in files]),
        ("camera", [facts.camera for facts in files]),
        ("JPEG tables", [facts.tables and f"quality {facts.quality} ({facts.tables})" for facts in files]),
    ):
        in_class = Counter(value for value, member in zip(values, members, strict=True) if member)
        frequent, _ = in_class.most_common(1)[0]
        same: Floats = np.array([value == frequent for value in values], dtype=np.float64)
        kind, look = "compression" if words == "JPEG tables" else "", f"with {words} {frequent or 'unknown'}"
        scores.append(Shortcut(label, name, words, kind, auc(same, members), look))
    return scores


def _sort_key(shortcut: Shortcut) -> tuple[float, bool, int]:
    # Fewer blocks than in the other images say little: blur has the same effect.
    weak = shortcut.name == "blocks" and shortcut.look == PROPERTIES[property_column("blocks")].low
    above = shortcut.score - _LIMITS.get(shortcut.name, LIMIT)
    return -min(round(above, 2), TIE_MARGIN), weak, _ORDER.index(shortcut.name)
