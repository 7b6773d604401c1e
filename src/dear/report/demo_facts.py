"""What the demo measured, part by part; `dear.workflows.demo` measures it and `demo_page` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dear.heads.roles import RoleMap
from dear.report.page import Thumbnail


@dataclass(frozen=True)
class TruthRow:
    """One concept: how much of its heads' variance its attribute explains, and of all other heads'."""

    concept: str  #: its name
    heads: int  #: number of heads with that role
    own: float  #: share of the variance, mean over those heads
    others: float  #: the same, mean over all other heads of the map


@dataclass(frozen=True)
class AccuracyRow:
    """One way to answer: accuracy on trained and on new classes, and their harmonic mean."""

    title: str
    trained: float
    new: float
    harmonic_mean: float
    recommended: bool = False


@dataclass(frozen=True)
class Changed:
    """What adaptation changed on the test images of some classes."""

    fixed: tuple[Thumbnail, ...]  #: images that zero-shot answered wrongly and the adapted model rightly
    broken: tuple[Thumbnail, ...]  #: the other way round
    counts: tuple[int, int]  #: how many images were fixed and broken in all
    #: (class, accuracy before, accuracy after), the largest loss first
    classes: tuple[tuple[str, float, float], ...]

    @property
    def worse(self) -> tuple[tuple[str, float, float], ...]:
        """The classes that lost."""
        return tuple(row for row in self.classes if row[2] < row[1])


@dataclass(frozen=True)
class TaskFacts:
    """What happened on one task."""

    name: str  #: of the task
    about: str  #: what its images show
    classes: tuple[int, int]  #: numbers of trained and of new classes
    images: tuple[int, int]  #: numbers of test images of trained and of new classes
    shots: int  #: training images per class
    seconds: float  #: of training
    rows: tuple[AccuracyRow, ...]  #: ways to answer, zero-shot first
    weights: Mapping[str, float]  #: fusion weights. trained, new: what changed, on trained and on new classes
    trained: Changed
    new: Changed


@dataclass(frozen=True)
class ConceptRow:
    """What the audit of the training images says of one concept."""

    concept: str
    information: float  #: mutual information with the labels over the labels' entropy
    expected: float  #: the same with labels dealt out at random
    verdict: str


@dataclass(frozen=True)
class RemovalRow:
    """A classifier after a removal."""

    title: str  #: what was removed
    worst: float  #: accuracy in the worst group of class and place
    everywhere: float  #: accuracy on all test images
    at_home: float  #: accuracy on images of a class at its place of training
    #: (lowest, highest) accuracy in the worst group over draws; None where there is one
    spread: tuple[float, float] | None = None
    recommended: bool = False  #: whether this is the repair


@dataclass(frozen=True)
class ShortcutFacts:
    """A shortcut in the training images, found and removed."""

    images: tuple[int, int]  #: numbers of training and of test images
    groups: int  #: number of groups of class and place in the test
    concepts: tuple[ConceptRow, ...]  #: verdicts of the audit, suspects first
    sentence: str  #: what the audit says of the planted concept
    heads: int  #: number of heads removed
    rows: tuple[RemovalRow, ...]  #: accuracies
    examples: tuple[Thumbnail, ...]  #: a training image per class
    fixed: tuple[Thumbnail, ...]  #: test images that only the repaired classifier answers rightly

    @property
    def repaired(self) -> RemovalRow:
        """The row of the repair."""
        return next(row for row in self.rows if row.recommended)

    @property
    def random(self) -> RemovalRow:
        """The row of random heads."""
        return next(row for row in self.rows if row.spread is not None)


@dataclass(frozen=True)
class PrecisionRow:
    """Retrieval in one concept: share of the nearest images that have the query's own value."""

    concept: str
    heads: int
    by_heads: float
    whole: float  #: by the whole image feature
    random: float  #: by as many random heads, mean over draws
    chance: float


@dataclass(frozen=True)
class RetrievalFacts:
    """Retrieval by heads."""

    images: int  #: how many images there are; each is the query once
    neighbors: int  #: nearest images that count
    rows: tuple[PrecisionRow, ...]  #: precision, one row per concept
    query: Thumbnail  #: one query
    found: Mapping[str, tuple[Thumbnail, ...]]  #: concept -> the images most similar to it


@dataclass(frozen=True)
class DemoFacts:
    """Everything the page shows."""

    roles: RoleMap
    truth: tuple[TruthRow, ...]
    tasks: tuple[TaskFacts, ...]
    shortcut: ShortcutFacts
    retrieval: RetrievalFacts
    quick: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)  #: per part of the demo
