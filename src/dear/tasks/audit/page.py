"""The page of an audit: classes that stand out by their images, concepts, and the answers without them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dear.report.headmap import HeadMap
from dear.report.page import Table, Thumbnail, render
from dear.utils.files import write_atomic

TERMS = {
    "concept": "something images differ in beside their class, such as the background; its values are words",
    "value": "the word of a concept that the frozen model finds nearest to an image",
    "information": "how much the value tells about the label: 0 nothing, 1 everything (mutual information "
    "over the entropy of the labels); “by chance” is the same for labels dealt out at random",
    "p": "how often labels dealt out at random go with the values as well as the real ones",
    "score": "how well one number per image tells the class from all others (area under the ROC curve: 0.5 "
    "not at all, 1 without error); for marks, how much less its images vary there than others do",
    "margin lost": "how much of the lead of the right answer over the next goes away with the concept",
    "suspected shortcut": "the concept goes with the labels, the model relies on it, and the class names do "
    "not differ in it",
    "group": "images of one class with one value",
}


@dataclass(frozen=True)
class ConceptEvidence:
    """What the page shows of one concept."""

    name: str  #: the concept
    sentence: str  #: the verdict in words
    suspected: bool  #: whether it is shown in full
    table: Table  #: images per class and value
    #: per heading ("dog: mostly beach") some images, the usual value first
    images: Mapping[str, tuple[Thumbnail, ...]]
    changed: tuple[Thumbnail, ...] = ()  #: images whose answer changes without the concept
    map: HeadMap | None = None  #: the heads that carry it; None where no head has that role
    heads: str = ""  #: the same in words
    why: str = ""  #: address of the page that explains such answers; empty: there is none


@dataclass(frozen=True)
class PhotoEvidence:
    """What the page shows of one class that a property of its images tells."""

    name: str
    sentence: str
    #: per heading some images: of the class, and the others nearest to it
    images: Mapping[str, tuple[Thumbnail, ...]]
    #: where a mark is; None for other properties
    map: Thumbnail | None = None
    #: what edits of held-out images do to the model's answers; empty: not asked
    edits: str = ""


@dataclass(frozen=True)
class AuditFacts:
    """Everything on the page."""

    title: str  #: heading
    lead: str  #: what was audited, in one sentence
    verdict: str  #: the result in one sentence
    tiles: tuple[tuple[str, str], ...]  #: (figure, words) at the top
    overview: Table  #: one row per concept
    concepts: tuple[ConceptEvidence, ...]  #: suspected ones first
    next_steps: Mapping[str, str]  #: sentence -> command
    notes: Mapping[str, str]  #: how it was made
    photos: Table | None = None  #: one row per class that stands out by its images; None: not looked at
    photo_evidence: tuple[PhotoEvidence, ...] = ()  #: the images behind it
    duplicates: Table | None = None  #: pairs of nearly the same images; None: there are none


def write_audit_page(facts: AuditFacts, out: str | os.PathLike[str]) -> None:
    """Write the page to the file `out`, whole or not at all."""
    write_atomic(out, audit_page(facts))


def audit_page(facts: AuditFacts) -> str:
    """The page as HTML text."""
    return render("audit.html", title=facts.title, facts=facts, terms=TERMS)
