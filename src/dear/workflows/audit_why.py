"""The explain page beside an audit's page: why the images were answered that change without a concept."""

from __future__ import annotations

from pathlib import Path

from dear._io.files import PathLike
from dear._io.notes import note
from dear._io.progress import Progress
from dear.errors import UsageError
from dear.heads.audit import Finding
from dear.report.explain_page import write_explain_page
from dear.runs.explain import Explainer
from dear.runs.model import Model
from dear.workflows.audit import Audit
from dear.workflows.explain import page_facts

MOST = 6  #: images per concept


def write_why_page(found: Audit, out: PathLike, progress: Progress | None = None) -> dict[str, str]:
    """Explain some answers that change without each suspected concept, on a page beside the audit's.

    Args:
        found: the audit of a run.
        out: the audit's page; the new one has `-why` behind its name.
        progress: called with (stage, done, total).

    Returns:
        Per concept the address of its first image, relative to the audit's page; empty where there is
        nothing to explain.
    """
    chosen = {one.association.concept: changed_images(found, one)[:MOST] for one in found.suspects}
    chosen = {name: places for name, places in chosen.items() if places}
    if found.method is None or not chosen:
        return {}
    images = found.held_out or found.images
    places = [place for each in chosen.values() for place in each]
    try:
        explainer = Explainer(Model(found.method), found.images, found.roles, progress=progress)
        explained = explainer.explain(images.subset(places), progress=progress)
    except UsageError as error:
        note(f"no page of explanations: {error}")
        return {}
    page = Path(out).with_name(f"{Path(out).stem}-why.html")
    write_explain_page(page_facts(explainer, explained, [images.image(place) for place in places]), page)
    links, first = {}, 1
    for name, own in chosen.items():
        links[name] = f"{page.name}#image-{first}"
        first += len(own)
    return links


def changed_images(found: Audit, finding: Finding) -> list[int]:
    """Places of the images whose answer changes without a concept, wrong answers first."""
    after = found.without.get(finding.association.concept)
    if after is None or found.answers is None or found.method is None:
        return []
    images = found.held_out or found.images
    truth = [images.classes[label] for label in images.labels.tolist()]
    answers = [found.method.classes[label] for label in found.answers.tolist()]
    changed: list[int] = (after != found.answers).nonzero().flatten().tolist()
    return sorted(changed, key=lambda place: answers[place] == truth[place])
