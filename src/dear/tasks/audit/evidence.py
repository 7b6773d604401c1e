"""The pages of an audit: tables, images by class and value, answers with and without a concept, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from dear.data.images import ImageSet, values_of
from dear.errors import UsageError
from dear.report.headmap import head_map
from dear.report.page import Table, Thumbnail, percent, thumbnail
from dear.runs.model import Model
from dear.shortcuts.find import Shortcut
from dear.shortcuts.properties import PROPERTIES
from dear.tasks.audit.concepts import Finding
from dear.tasks.audit.page import AuditFacts, ConceptEvidence, PhotoEvidence, write_audit_page
from dear.tasks.audit.photos import PhotoAudit
from dear.tasks.audit.task import Audit
from dear.tasks.explain.explainer import Explainer
from dear.tasks.explain.page import write_explain_page
from dear.tasks.explain.task import page_facts
from dear.utils.files import PathLike
from dear.utils.notices import note
from dear.utils.progress import Progress

_IMAGES, _CLASSES, _VALUES, _PAIRS = 6, 8, 12, 40
_EXPLAINED = 6  # images per concept on the page that explains them


def write_pages(found: Audit, out: PathLike, next_steps: Mapping[str, str], progress: Progress) -> None:
    """Write the audit's page, and where a run was audited a second one that explains changed answers."""
    why = _write_why_page(found, out, progress)
    write_audit_page(evidence(found, next_steps, why), out)


def _write_why_page(found: Audit, out: PathLike, progress: Progress) -> dict[str, str]:
    """Explain some answers that change without each suspected concept; addresses by concept.

    The page is called as the audit's with `-why` behind its name.
    """
    changed = {one.association.concept: _changed_places(found, one)[:_EXPLAINED] for one in found.suspects}
    chosen = {name: places for name, places in changed.items() if places}
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


def _changed_places(found: Audit, finding: Finding) -> list[int]:
    """Places of the images whose answer changes without a concept, wrong answers first."""
    after = found.without.get(finding.association.concept)
    if after is None or found.answers is None or found.method is None:
        return []
    images = found.held_out or found.images
    truth = [images.classes[label] for label in images.labels.tolist()]
    answers = [found.method.classes[label] for label in found.answers.tolist()]
    changed: list[int] = (after != found.answers).nonzero().flatten().tolist()
    return sorted(changed, key=lambda place: answers[place] == truth[place])


def evidence(
    found: Audit, next_steps: Mapping[str, str] | None = None, why: Mapping[str, str] | None = None
) -> AuditFacts:
    """What the page of an audit shows.

    Args:
        found: the audit.
        next_steps: what a reader can do, sentence -> command.
        why: per concept the address of explained answers.
    """
    suspects = {finding.association.concept for finding in found.suspects}
    what = f"{len(found.images)} images of {found.images.name}"
    if found.method is not None:
        where = f"{len(found.held_out)} held-out images" if found.held_out is not None else "these images"
        what += f", and {found.method.title} tested on {where}"
    if found.clip is not None:
        what += f", on the backbone {found.clip.name}"
    tiles = [(str(len(found.images)), "images"), (str(len(found.images.classes)), "classes")]
    photos = found.photos
    if photos is not None:
        tiles.append((str(len(photos.shortcuts)), "classes that stand out by their images"))
    if found.findings:
        plural = "s" * (len(suspects) != 1)
        words = f"suspected shortcut{plural}" if found.method else f"concept{plural} to watch"
        tiles.append((str(len(suspects)), words))
    if found.worst_group is not None:
        tiles.append((percent(found.worst_group[1]), f"in the worst group: {found.worst_group[0]}"))
    links = why or {}
    return AuditFacts(
        title=f"Audit of {found.images.name}",
        lead=f"{what}.",
        verdict=verdict(found),
        tiles=tuple(tiles),
        overview=concept_table(found),
        concepts=tuple(
            replace(_concept(found, one), why=links.get(one.association.concept, ""))
            for one in found.findings
        ),
        next_steps=next_steps or {},
        notes=_notes(found),
        photos=None if photos is None else photo_table(photos),
        photo_evidence=() if photos is None else _photos(found.images, photos),
        duplicates=None if photos is None or not photos.duplicates else _duplicates(photos),
    )


def verdict(found: Audit) -> str:
    """The result in a sentence or two."""
    sentences = []
    if found.photos is not None:
        names = ", ".join(one.class_name for one in found.photos.shortcuts)
        sentences.append(
            f"Stand out by their images: {names}." if names else "No class stands out by its images."
        )
    if found.findings:
        names = ", ".join(finding.association.concept for finding in found.suspects)
        sentences.append(f"Suspected concepts: {names}." if names else "No concept is a suspected shortcut.")
    return " ".join(sentences)


def photo_table(photos: PhotoAudit) -> Table:
    """One row per class that stands out by its images."""
    columns = ("class", "its images are", "property", "score", "others called so when edited")
    rows = []
    for one in photos.shortcuts:
        test = photos.causal.get(one.class_name)
        moved = "" if test is None else f"{percent(test.plain)} to {percent(test.edited)}"
        rows.append((one.class_name, one.look, one.name, f"{one.score:.2f}", moved))
    shown = 5 if photos.causal else 4
    return Table(columns[:shown], tuple(row[:shown] for row in rows), labels=3)


def _photos(images: ImageSet, photos: PhotoAudit) -> tuple[PhotoEvidence, ...]:
    """Per class that stands out, its images with the clearest values, and the others nearest to them."""
    labels, result = np.asarray(images.labels), []
    for one in photos.shortcuts[:_CLASSES]:
        own, others = np.flatnonzero(labels == one.label), np.flatnonzero(labels != one.label)
        if one.values is not None and one.name in {each.name for each in PROPERTIES}:
            column = photos.measured.column(one.name)
            sign = 1 if one.values[0] >= one.values[1] else -1
            own, others = own[np.argsort(-sign * column[own])], others[np.argsort(-sign * column[others])]
        shown = {f"{one.class_name}, clearest first": own}
        if one.mark is None:
            shown["others that come nearest"] = others
        small = {
            words: tuple(_small(images, int(row)) for row in rows[:_IMAGES]) for words, rows in shown.items()
        }
        test = photos.causal.get(one.class_name)
        edits = "" if test is None else test.sentence
        result.append(PhotoEvidence(one.class_name, one.sentence, small, _mark_map(one), edits))
    return tuple(result)


def _small(images: ImageSet, place: int) -> Thumbnail:
    name = images.classes[int(images.labels[place])]
    return Thumbnail(thumbnail(images.image(place)), name, (("name", name),))


def _mark_map(one: Shortcut) -> Thumbnail | None:
    """The mark in its own colors on gray: where all images of the class agree; None for other properties."""
    if one.mark is None:
        return None
    pixels = np.full((*one.mark.mask.shape, 3), 225, dtype=np.uint8)
    pixels[one.mark.mask] = one.mark.look[one.mark.mask]
    drawn = Image.fromarray(pixels).resize((144, 144), Image.Resampling.NEAREST)
    text = f"where images of {one.class_name} agree: {one.mark.place}"
    return Thumbnail(thumbnail(drawn), text, (("name", one.mark.place),))


def _duplicates(photos: PhotoAudit) -> Table:
    rows = tuple((pair.first, pair.second, pair.where, pair.kind) for pair in photos.duplicates[:_PAIRS])
    return Table(("image", "nearly the same", "in", "kind"), rows, labels=4)


def concept_table(found: Audit) -> Table:
    """One row per concept."""
    columns = ("concept", "verdict", "information", "by chance", "p", "answers changed", "margin lost")
    rows = []
    for finding in found.findings:
        about, used = finding.association, finding.reliance
        figures = (f"{about.information:.2f}", f"{about.expected:.2f}", f"{about.p_value:.3f}")
        relied = ("", "") if used is None else (percent(used.changed), percent(used.lost))
        rows.append((about.concept, finding.title, *figures, *relied))
    shown = 7 if found.method is not None else 5
    marks = tuple("best" if finding in found.suspects else "" for finding in found.findings)
    return Table(columns[:shown], tuple(row[:shown] for row in rows), labels=2, classes=marks)


def _concept(found: Audit, finding: Finding) -> ConceptEvidence:
    about, suspected = finding.association, finding in found.suspects
    order = about.table.sum(dim=0).argsort(descending=True).tolist()[:_VALUES]
    order = [value for value in order if int(about.table[:, value].sum()) > 0]
    rows = [
        (name, *(str(int(about.table[label, value])) for value in order))
        for label, name in enumerate(found.images.classes)
    ]
    table = Table(("class", *(about.words[value] for value in order)), tuple(rows))
    plain = ConceptEvidence(about.concept, finding.sentence, suspected, table, {})
    if not suspected:
        return plain
    heads, marked = "", None
    if found.roles is not None and finding.heads:
        names = ", ".join(f"layer {layer} head {head}" for layer, head in finding.heads)
        heads = f"{len(finding.heads)} heads have the role {about.concept}: {names}. The others are gray."
        marked = head_map(found.roles, only=finding.heads)
    elif found.roles is not None:
        heads = "No head of the role map has this role."
    return replace(
        plain, images=_by_class(found, finding), changed=_changed(found, finding), map=marked, heads=heads
    )


def _by_class(found: Audit, finding: Finding) -> dict[str, tuple[Thumbnail, ...]]:
    """Some images of every class: those with its usual value first, then the others."""
    about, result = finding.association, {}
    known = values_of(found.images)

    def small(index: int, name: str) -> Thumbnail:
        value = about.words[int(about.seen[index])]
        group = () if known is None else (("soft", f"group {known[index]}"),)
        return Thumbnail(thumbnail(found.images.image(index)), f"{name}, {value}", (("name", value), *group))

    for label, name in enumerate(found.images.classes[:_CLASSES]):
        members = (found.images.labels == label).nonzero().flatten().tolist()
        if not members:
            continue
        usual = int(about.table[label].argmax())
        share = int(about.table[label, usual]) / len(members)
        same = [index for index in members if int(about.seen[index]) == usual]
        other = [index for index in members if int(about.seen[index]) != usual]
        shown = same[: _IMAGES - min(2, len(other))] + other[:2]
        title = f"{name}: {about.words[usual]} in {percent(share)} of its images"
        result[title] = tuple(small(index, name) for index in shown)
    return result


def _changed(found: Audit, finding: Finding) -> tuple[Thumbnail, ...]:
    """Images whose answer changes without the concept, with both answers."""
    if found.method is None or found.answers is None:
        return ()
    result, images = [], found.held_out or found.images
    for index in sorted(_changed_places(found, finding))[: 2 * _IMAGES]:
        truth = images.classes[int(images.labels[index])]
        lines = [("name", truth)]
        for words, answers in (
            ("with:", found.answers),
            ("without:", found.without[finding.association.concept]),
        ):
            answer = found.method.classes[int(answers[index])]
            lines.append(("right" if answer == truth else "wrong", f"{words} {answer}"))
        result.append(Thumbnail(thumbnail(images.image(index)), truth, tuple(lines)))
    return tuple(result)


def _notes(found: Audit) -> dict[str, str]:
    roles = "none" if found.roles is None else f"{len(found.roles)} heads, by the rule {found.roles.rule}"
    backbone = "none: the images alone were looked at" if found.clip is None else found.clip.name
    notes = {"images": found.images.name, "backbone": backbone, "role map": roles}
    if found.method is not None:
        correction = found.method.clip.correction
        notes["removed before training"] = "nothing" if correction is None else correction.note
    return notes
