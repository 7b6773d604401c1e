"""What the demo measured, part by part; `task` measures it, `page` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import harmonic_mean

from dear.heads.roles import RoleMap
from dear.report.page import Thumbnail
from dear.tasks.audit.findings import ConceptFinding
from dear.tasks.explain.explanation import Explanation
from dear.tasks.run_report.facts import Compared, RunFacts


@dataclass(frozen=True)
class TruthRow:
    """One concept: how much of its heads' variance its attribute explains, and of all other heads'."""

    concept: str  #: its name
    heads: int  #: number of heads with that role
    matching: float  #: share of the variance, mean over those heads
    others: float  #: the same, mean over all other heads of the map


@dataclass(frozen=True)
class AccuracyRow:
    """One way to answer: accuracy on trained and on new classes, and their harmonic mean."""

    title: str
    trained: float
    new: float
    recommended: bool = False

    @property
    def harmonic_mean(self) -> float:
        """Of both accuracies."""
        return harmonic_mean((self.trained, self.new))


@dataclass(frozen=True)
class TaskFacts:
    """DeAR on one task, as `examine` found it."""

    name: str  #: of the task
    about: str  #: what its images show
    shots: int  #: training images per class
    seconds: float  #: of training
    run: RunFacts

    @property
    def trained(self) -> Compared:
        """Answers on trained classes."""
        return self.run.trained

    @property
    def new(self) -> Compared:
        """Answers on new classes."""
        assert self.run.new is not None
        return self.run.new.alone

    @property
    def rows(self) -> tuple[AccuracyRow, ...]:
        """Zero-shot, then every mode of the adapted model."""
        trained, new = self.trained.accuracies(), self.new.accuracies()
        return tuple(
            AccuracyRow(
                name if name == "zero-shot" else f"{self.run.method}, {name}",
                trained[name],
                new[name],
                name == self.trained.mode,
            )
            for name in trained
        )

    @property
    def used(self) -> AccuracyRow:
        """The row of the recommended mode."""
        return next(row for row in self.rows if row.recommended)


@dataclass(frozen=True)
class ShortcutFacts:
    """A shortcut in the training images, found by an audit and removed by a repair."""

    images: int  #: number of training images
    groups: int  #: number of groups of class and place in the test
    findings: tuple[ConceptFinding, ...]  #: of the audit, suspects first
    concept: str  #: what was removed
    heads: int  #: number of heads removed
    #: "accuracy" and "worst_group" of the run, of the repaired run, and of runs without random heads
    untouched: Mapping[str, float]
    repaired: Mapping[str, float]
    random: tuple[Mapping[str, float], ...]
    at_home: tuple[float, float]  #: accuracy at the places of training, before and after
    examples: tuple[Thumbnail, ...]  #: a training image per class
    compared: Compared  #: answers of the repaired run compared with those of the run

    @property
    def random_mean(self) -> dict[str, float]:
        """Means over the draws of random heads."""
        return {key: sum(draw[key] for draw in self.random) / len(self.random) for key in self.untouched}


@dataclass(frozen=True)
class FocusFacts:
    """Learning with the heads of one role, from one image per class."""

    data: str
    role: str
    heads: int  #: number of heads with that role
    classes: int
    test_images: int
    accuracies: Mapping[str, tuple[float, ...]]  #: what was learned with -> accuracy, one per draw of images

    @property
    def means(self) -> dict[str, float]:
        """Mean accuracy over the draws."""
        return {name: sum(draws) / len(draws) for name, draws in self.accuracies.items()}


@dataclass(frozen=True)
class PrecisionRow:
    """Retrieval in one concept: share of the nearest images that have the query's own value."""

    concept: str
    heads: int
    by_heads: float
    whole: float  #: by the whole image feature
    random: float  #: by as many random heads, mean over draws
    chance: float

    @property
    def ways(self) -> dict[str, float]:
        """The shares by way, as the figure names them."""
        shares = (self.by_heads, self.whole, self.random, self.chance)
        return dict(zip(("heads", "whole feature", "random heads", "chance"), shares, strict=True))


@dataclass(frozen=True)
class RetrievalFacts:
    """Retrieval by heads."""

    images: int  #: how many images there are; each is the query once
    neighbors: int  #: nearest images that count
    rows: tuple[PrecisionRow, ...]  #: precision, one row per concept
    query: Thumbnail  #: one query
    most_similar: Mapping[str, tuple[Thumbnail, ...]]  #: concept -> the images most similar to it


@dataclass(frozen=True)
class DemoFacts:
    """Everything the page shows."""

    roles: RoleMap
    truth: tuple[TruthRow, ...]
    tasks: tuple[TaskFacts, ...]
    shortcut: ShortcutFacts
    explained: Mapping[str, Explanation]  #: one right and one wrong answer, by title
    focus: FocusFacts
    retrieval: RetrievalFacts
    quick: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)  #: per part of the demo
