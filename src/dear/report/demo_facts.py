"""What the demo measured, part by part; `dear.workflows.demo` measures it and `demo_page` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dear.heads.roles import RoleMap
from dear.report.page import Thumbnail


@dataclass(frozen=True)
class TruthRow:
    """One concept: how much of its heads' variance the attribute of that name explains, and of all others'.

    Attributes:
        concept: its name.
        heads: number of heads with that role.
        own: share of the variance, mean over those heads.
        others: the same, mean over all other heads of the map.
    """

    concept: str
    heads: int
    own: float
    others: float


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
    """What adaptation changed on the test images of some classes.

    Attributes:
        fixed: images that zero-shot answered wrongly and the adapted model rightly.
        broken: the other way round.
        counts: how many images were fixed and broken in all.
        classes: (class, accuracy before, accuracy after), the largest loss first.
    """

    fixed: tuple[Thumbnail, ...]
    broken: tuple[Thumbnail, ...]
    counts: tuple[int, int]
    classes: tuple[tuple[str, float, float], ...]

    @property
    def worse(self) -> tuple[tuple[str, float, float], ...]:
        """The classes that lost."""
        return tuple(row for row in self.classes if row[2] < row[1])


@dataclass(frozen=True)
class TaskFacts:
    """What happened on one task.

    Attributes:
        name: of the task.
        about: what its images show.
        classes: numbers of trained and of new classes.
        images: numbers of test images of trained and of new classes.
        shots: training images per class.
        seconds: of training.
        rows: ways to answer, zero-shot first.
        weights: fusion weights.
        trained, new: what changed, on trained and on new classes.
    """

    name: str
    about: str
    classes: tuple[int, int]
    images: tuple[int, int]
    shots: int
    seconds: float
    rows: tuple[AccuracyRow, ...]
    weights: Mapping[str, float]
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
    """A classifier after a removal.

    Attributes:
        title: what was removed.
        worst: accuracy in the worst group of class and place.
        everywhere: accuracy on all test images.
        at_home: accuracy on images of a class at its place of training.
        spread: (lowest, highest) accuracy in the worst group over draws; None where there is one.
        recommended: whether this is the repair.
    """

    title: str
    worst: float
    everywhere: float
    at_home: float
    spread: tuple[float, float] | None = None
    recommended: bool = False


@dataclass(frozen=True)
class ShortcutFacts:
    """A shortcut in the training images, found and removed.

    Attributes:
        images: numbers of training and of test images.
        groups: number of groups of class and place in the test.
        concepts: verdicts of the audit, suspects first.
        sentence: what the audit says of the planted concept.
        heads: number of heads removed.
        rows: accuracies.
        examples: a training image per class.
        fixed: test images that only the repaired classifier answers rightly.
    """

    images: tuple[int, int]
    groups: int
    concepts: tuple[ConceptRow, ...]
    sentence: str
    heads: int
    rows: tuple[RemovalRow, ...]
    examples: tuple[Thumbnail, ...]
    fixed: tuple[Thumbnail, ...]

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
    """Retrieval by heads.

    Attributes:
        images: how many images there are; each is the query once.
        neighbors: nearest images that count.
        rows: precision, one row per concept.
        query: one query.
        found: concept -> the images most similar to it.
    """

    images: int
    neighbors: int
    rows: tuple[PrecisionRow, ...]
    query: Thumbnail
    found: Mapping[str, tuple[Thumbnail, ...]]


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
