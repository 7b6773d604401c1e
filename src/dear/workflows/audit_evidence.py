"""From an audit to what its page shows: tables, images by class and value, answers with and without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from PIL import Image

from dear.data.images import ImageSet, values_of
from dear.heads.audit import Finding
from dear.photos.properties import PROPERTIES
from dear.photos.shortcuts import Shortcut
from dear.report.audit_page import AuditFacts, ConceptEvidence, PhotoEvidence
from dear.report.headmap import head_map
from dear.report.page import Table, Thumbnail, percent, thumbnail
from dear.workflows.audit import Audit
from dear.workflows.audit_photos import PhotoAudit

_IMAGES, _CLASSES, _VALUES, _PAIRS = 6, 8, 12, 40


def evidence(
    found: Audit, next_steps: Mapping[str, str] | None = None, why: Mapping[str, str] | None = None
) -> AuditFacts:
    """What the page of an audit shows.

    Args:
        found: the audit.
        next_steps: what a reader can do, sentence -> command.
        why: per concept the address of explained answers (`dear.workflows.audit_why`).
    """
    suspects = {finding.association.concept for finding in found.suspects}
    what = f"{len(found.images)} images of {found.images.name}"
    if found.method is not None:
        where = f"{len(found.held_out)} held-out images" if found.held_out is not None else "these images"
        what += f", and {found.method.title} tested on {where}"
    on = "" if found.clip is None else f", on the backbone {found.clip.name}"
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
    return AuditFacts(
        f"Audit of {found.images.name}",
        f"{what}{on}.",
        verdict(found),
        tuple(tiles),
        overview(found),
        tuple(
            replace(
                _concept(found, finding, finding.association.concept in suspects),
                why=(why or {}).get(finding.association.concept, ""),
            )
            for finding in found.findings
        ),
        next_steps or {},
        _notes(found),
        None if photos is None else photo_table(found),
        () if photos is None else tuple(_photo(found, one) for one in photos.shortcuts[:_CLASSES]),
        None if photos is None or not photos.duplicates else _duplicates(photos),
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


def photo_table(found: Audit) -> Table:
    """One row per class that stands out by its images."""
    photos = found.photos
    rows: list[tuple[str, ...]] = []
    for one in photos.shortcuts if photos is not None else ():
        test = None if photos is None else photos.causal.get(one.class_name)
        moved = "" if test is None else f"{percent(test.plain)} to {percent(test.edited)}"
        rows.append((one.class_name, one.look, one.name, f"{one.score:.2f}", moved))
    columns: tuple[str, ...] = (
        "class",
        "its images are",
        "property",
        "score",
        "others called so when edited",
    )
    if photos is None or not photos.causal:
        columns, rows = columns[:4], [row[:4] for row in rows]
    return Table(columns, tuple(rows), labels=3)


def _photo(found: Audit, one: Shortcut) -> PhotoEvidence:
    """Images of the class with the clearest values, and the others nearest to them."""
    photos, images = found.photos, found.images
    assert photos is not None
    labels = np.asarray(images.labels)
    own, others = np.flatnonzero(labels == one.label), np.flatnonzero(labels != one.label)
    if one.values is not None and one.name in {each.name for each in PROPERTIES}:
        column = photos.measured.column(one.name)
        sign = 1 if one.values[0] >= one.values[1] else -1
        own, others = own[np.argsort(-sign * column[own])], others[np.argsort(-sign * column[others])]
    shown = {
        f"{one.class_name}, clearest first": tuple(_small(images, place, one) for place in own[:_IMAGES]),
        "others that come nearest": tuple(_small(images, place, one) for place in others[:_IMAGES]),
    }
    test = photos.causal.get(one.class_name)
    if one.mark is not None:
        shown.pop("others that come nearest")
    return PhotoEvidence(
        one.class_name,
        one.sentence,
        shown,
        None if one.mark is None else _mark_map(one),
        "" if test is None else test.sentence,
    )


def _small(images: ImageSet, place: int, one: Shortcut) -> Thumbnail:
    name = images.classes[int(images.labels[place])]
    return Thumbnail(thumbnail(images.image(int(place))), name, (("name", name),))


def _mark_map(one: Shortcut) -> Thumbnail:
    """The mark in its own colors on gray: where all images of the class agree."""
    assert one.mark is not None
    pixels = np.full((*one.mark.mask.shape, 3), 225, dtype=np.uint8)
    pixels[one.mark.mask] = one.mark.look[one.mark.mask]
    drawn = Image.fromarray(pixels).resize((144, 144), Image.Resampling.NEAREST)
    text = f"where images of {one.class_name} agree: {one.mark.place}"
    return Thumbnail(thumbnail(drawn), text, (("name", one.mark.place),))


def _duplicates(photos: PhotoAudit) -> Table:
    rows = tuple((pair.first, pair.second, pair.where, pair.kind) for pair in photos.duplicates[:_PAIRS])
    return Table(("image", "nearly the same", "in", "kind"), rows, labels=4)


def overview(found: Audit) -> Table:
    """One row per concept."""
    suspects = {finding.association.concept for finding in found.suspects}
    rows = []
    for finding in found.findings:
        about, used = finding.association, finding.reliance
        relied: tuple[str, ...] = ()
        if found.method is not None:
            relied = ("", "") if used is None else (percent(used.changed), percent(used.lost))
        figures = (f"{about.information:.2f}", f"{about.expected:.2f}", f"{about.p_value:.3f}")
        rows.append((about.concept, finding.title, *figures, *relied))
    columns: tuple[str, ...] = ("concept", "verdict", "information", "by chance", "p")
    if found.method is not None:
        columns += ("answers changed", "margin lost")
    marks = tuple("best" if row[0] in suspects else "" for row in rows)
    return Table(columns, tuple(rows), labels=2, classes=marks)


def _concept(found: Audit, finding: Finding, suspected: bool) -> ConceptEvidence:
    about = finding.association
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
    heads = "No head of the role map has this role." if found.roles is not None else ""
    marked = None
    if found.roles is not None and finding.heads:
        names = ", ".join(f"layer {layer} head {head}" for layer, head in finding.heads)
        heads = f"{len(finding.heads)} heads have the role {about.concept}: {names}. The others are gray."
        marked = head_map(found.roles, only=finding.heads)
    return replace(
        plain, images=_by_class(found, finding), changed=_changed(found, finding), map=marked, heads=heads
    )


def _by_class(found: Audit, finding: Finding) -> dict[str, tuple[Thumbnail, ...]]:
    """Some images of every class: those with its usual value first, then the others."""
    about, result = finding.association, {}
    known = values_of(found.images)
    for label, name in enumerate(found.images.classes[:_CLASSES]):
        members = [index for index, own in enumerate(found.images.labels.tolist()) if own == label]
        if not members:
            continue
        usual = int(about.table[label].argmax())
        share = int(about.table[label, usual]) / len(members)
        same = [index for index in members if int(about.seen[index]) == usual]
        other = [index for index in members if int(about.seen[index]) != usual]
        shown = same[: _IMAGES - min(2, len(other))] + other[:2]
        lines: dict[int, tuple[tuple[str, str], ...]] = {}
        for index in shown:
            group = () if known is None else (("soft", f"group {known[index]}"),)
            lines[index] = (("name", about.words[int(about.seen[index])]), *group)
        result[f"{name}: {about.words[usual]} in {percent(share)} of its images"] = tuple(
            Thumbnail(thumbnail(found.images.image(index)), f"{name}, {lines[index][0][1]}", lines[index])
            for index in shown
        )
    return result


def _changed(found: Audit, finding: Finding) -> tuple[Thumbnail, ...]:
    """Images whose answer changes without the concept, with both answers."""
    after = found.without.get(finding.association.concept)
    if after is None or found.answers is None or found.method is None:
        return ()
    result = []
    classes, images = found.method.classes, found.held_out or found.images
    for index in (after != found.answers).nonzero().flatten().tolist()[: 2 * _IMAGES]:
        truth = images.classes[int(images.labels[index])]
        answers = (classes[int(found.answers[index])], classes[int(after[index])])
        lines = tuple(
            ("right" if answer == truth else "wrong", f"{words} {answer}")
            for words, answer in zip(("with:", "without:"), answers, strict=True)
        )
        result.append(Thumbnail(thumbnail(images.image(index)), truth, (("name", truth), *lines)))
    return tuple(result)


def _notes(found: Audit) -> dict[str, str]:
    roles = "none" if found.roles is None else f"{len(found.roles)} heads, by the rule {found.roles.rule}"
    backbone = "none: the images alone were looked at" if found.clip is None else found.clip.name
    notes = {"images": found.images.name, "backbone": backbone, "role map": roles}
    if found.method is not None:
        correction = found.method.clip.correction
        notes["removed before training"] = "nothing" if correction is None else correction.note
    return notes
