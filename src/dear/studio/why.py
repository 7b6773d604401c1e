"""The panel Why of the tab Classify: an explained answer, and where in an image a phrase is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dear.errors import InputError
from dear.report.explain_page import heat
from dear.report.page import render
from dear.runs.explain import Explainer
from dear.runs.model import Model
from dear.runs.where import where
from dear.studio.state import StudioState
from dear.workflows.explain import page_facts, seen

Named = tuple[str, Any]  #: name and Pillow image


def _first(images: Sequence[Named]) -> Named:
    if not images:
        raise InputError("classify an image first; the panel explains the first one")
    return images[0]


def why_html(state: StudioState, images: Sequence[Named], classes: Sequence[str], template: str) -> str:
    """The adapted model's answer for the first image, explained."""
    _, image = _first(images)
    trained = Model.of(state.find_model())
    same = tuple(classes) == trained.classes and template == trained.template
    model = trained if same else trained.with_classes(classes, template)
    explainer = Explainer(model, state.images, state.roles)
    found = explainer.explain([image])
    facts = page_facts(explainer, found, [image]).images[0]
    return render("studio/why.html", one=facts)


def where_html(state: StudioState, images: Sequence[Named], phrase: str) -> str:
    """Where the frozen backbone sees a phrase in the first image."""
    _, image = _first(images)
    found = where(state.clip.plain, image, phrase)
    shown = heat(seen(image, Model.of(state.find_model())), found, f"where {phrase} is", ("name", phrase))
    return render("studio/gallery.html", title=f"Where is {phrase.strip()}?", images=(shown,))
