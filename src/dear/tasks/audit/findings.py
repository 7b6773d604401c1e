"""What an audit reports: image properties and concepts in one list, one verdict each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dear.heads.names import Head
from dear.shortcuts.causal import EditTest
from dear.shortcuts.find import Shortcut

if TYPE_CHECKING:
    from dear.tasks.audit.association import Association
    from dear.tasks.audit.reliance import Reliance

SHORTCUT = "shortcut"  #: associated with the labels, and the model relies on it
ASSOCIATED = "associated"  #: associated with the labels; no model was tested
UNCERTAIN = "too few images to tell"  #: whether the model relies on it
SHIFTS = "shifts scores only"  #: associated; without it scores change, but hardly any answer
UNUSED = "unused"  #: associated, but the model does not rely on it
EXPLAINED = "explained by another concept"  #: associated only as far as a stronger concept is
CLASS_DEFINING = "class-defining"  #: associated, and the class names differ in it as well
FILES_ONLY = "in the files only"  #: a fact of the files that no model sees
NOT_ASSOCIATED = "not associated"

VERDICTS = (
    SHORTCUT, ASSOCIATED, UNCERTAIN, EXPLAINED, SHIFTS, UNUSED, CLASS_DEFINING, FILES_ONLY, NOT_ASSOCIATED
)  # fmt: skip
SUSPECTED = (SHORTCUT, ASSOCIATED)  #: verdicts on which to act


@dataclass(frozen=True, eq=False)
class PropertyFinding:
    """An image property that separates one class from all others."""

    shortcut: Shortcut
    test: EditTest | None = None  #: answers for edited held-out images; None: no model was tested

    @property
    def name(self) -> str:
        """What was found, and where: "ramen: sharpness"."""
        return f"{self.shortcut.class_name}: {self.shortcut.title}"

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if not self.shortcut.kind:
            return FILES_ONLY
        if self.test is None:
            return ASSOCIATED
        if self.test.relies:
            return SHORTCUT
        return UNCERTAIN if self.test.uncertain else UNUSED

    @property
    def title(self) -> str:
        """The verdict in a few words."""
        return self.verdict

    @property
    def suspected(self) -> bool:
        """Whether to act on it."""
        return self.verdict in SUSPECTED

    @property
    def removable(self) -> str:
        """What `--without` takes to remove it; empty: nothing."""
        return self.shortcut.kind

    @property
    def strength(self) -> float:
        """How closely it is associated with the labels, for sorting."""
        return self.shortcut.score

    @property
    def sentence(self) -> str:
        """The finding for people."""
        first = self.shortcut.sentence
        if self.test is None:
            return first if self.shortcut.kind else f"{first} This is a fact of the files; no model sees it."
        words = {SHORTCUT: "The model uses it", UNUSED: "The model does not use it"}
        reason = words.get(self.verdict, "Too few held-out images to tell whether the model uses it")
        return f"{first} {reason}: {self.test.sentence}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": "property",
            "name": self.name,
            "verdict": self.verdict,
            "suspected": self.suspected,
            "sentence": self.sentence,
            **self.shortcut.to_dict(),
            "edits": None if self.test is None else self.test.to_dict(),
        }


@dataclass(frozen=True, eq=False)
class ConceptFinding:
    """The verdict on one concept."""

    association: Association  #: with the labels
    reliance: Reliance | None  #: of the model; None where no model was tested
    heads: tuple[Head, ...]  #: the heads with that role
    verdict: str  #: one of `VERDICTS`
    sentence: str  #: the verdict for people
    explained_by: str = ""  #: the stronger concept; empty: none

    @property
    def name(self) -> str:
        """The concept, after the label that it is associated with where images have several."""
        return self.association.name

    @property
    def title(self) -> str:
        """The verdict in a few words: "shortcut", "explained by Text"."""
        return f"explained by {self.explained_by}" if self.explained_by else self.verdict

    @property
    def suspected(self) -> bool:
        """Whether to act on it."""
        return self.verdict in SUSPECTED

    @property
    def removable(self) -> str:
        """What `--without` takes to remove it; empty: images have several labels, which it does not take."""
        return "" if self.association.label else self.name.lower()

    @property
    def strength(self) -> float:
        """How closely it is associated with the labels, for sorting."""
        return self.association.excess

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        about, used = self.association, self.reliance
        return {
            "kind": "concept",
            "name": self.name,
            "verdict": self.verdict,
            "suspected": self.suspected,
            "sentence": self.sentence,
            "without": self.removable,
            "explained_by": self.explained_by or None,
            "information": about.information,
            "required": about.required,
            "shuffled_labels": about.expected,
            "random_directions": about.expected + about.random_excess,
            "p_value": about.p_value,
            "class_name_ratio": about.class_name_ratio,
            "values": list(about.words),
            "images": about.table.tolist(),
            "heads": [list(head) for head in self.heads],
            "answers_changed": None if used is None else used.changed,
            "margin": None if used is None else used.margin,
            "margin_without": None if used is None else used.margin_without,
        }


Finding = PropertyFinding | ConceptFinding


def sort_findings(findings: list[Finding]) -> tuple[Finding, ...]:
    """By verdict, those to act on first; properties before concepts; then by strength."""
    return tuple(
        sorted(
            findings,
            key=lambda one: (
                VERDICTS.index(one.verdict),
                isinstance(one, ConceptFinding),
                -one.strength,
            ),
        )
    )
