"""The page on which labels that look wrong are kept, changed or dropped."""

from __future__ import annotations

import json
from dataclasses import dataclass

from markupsafe import Markup

from dear.report.page import render


@dataclass(frozen=True)
class LabelRow:
    """An image whose label looks wrong."""

    index: int  #: in the set
    image: str  #: data URL
    path: str
    label: str
    suggestion: str
    confidence: float  #: probability of the suggestion
    own: float  #: probability of the label


@dataclass(frozen=True)
class LabelFacts:
    """Everything on the page."""

    name: str
    images: int
    found: int  #: suspects in all; `rows` may be fewer
    backbone: str
    factor: float
    folder: str
    rows: tuple[LabelRow, ...]
    classes: tuple[str, ...]
    paths: tuple[str, ...]  #: of all images, relative to `folder`
    labels: tuple[int, ...]  #: of all images
    splits: tuple[str, ...]  #: of all images


def labels_page(facts: LabelFacts) -> str:
    """The page as HTML text; it loads nothing and sends nothing."""
    data = {"classes": facts.classes, "paths": facts.paths, "labels": facts.labels, "splits": facts.splits}
    text = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c").replace("&", "\\u0026")
    return render("labels.html", title=f"Labels of {facts.name}", facts=facts, data=Markup(text))
