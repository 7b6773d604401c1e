"""From an audit to what its page shows: tables, images by class and value, answers with and without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dear.data.images import values_of
from dear.heads.audit import Finding
from dear.heads.roles import RoleMap
from dear.report.audit_page import AuditFacts, ConceptEvidence
from dear.report.headmap import HeadMap, head_map
from dear.report.page import Table, Thumbnail, percent, thumbnail
from dear.workflows.audit import Audit

_IMAGES, _CLASSES, _VALUES = 6, 8, 12


def evidence(found: Audit, next_steps: Mapping[str, str] | None = None) -> AuditFacts:
    """What the page of an audit shows.

    Args:
        found: the audit.
        next_steps: what a reader can do, sentence -> command.
    """
    suspects = {finding.association.concept for finding in found.suspects}
    what = f"{len(found.images)} images of {found.images.name}"
    model = "" if found.method is None else f", answered by {found.method.title}"
    names = ", ".join(suspects)
    tiles = [(str(len(found.images)), "images"), (str(len(found.images.classes)), "classes")]
    tiles += [(str(len(suspects)), "suspected shortcuts" if found.method else "concepts to watch")]
    if found.worst_group is not None:
        tiles.append((percent(found.worst_group[1]), f"in the worst group: {found.worst_group[0]}"))
    return AuditFacts(
        f"Audit of {found.images.name}",
        f"{what}{model}, on the backbone {found.clip.name}.",
        f"Suspected: {names}." if suspects else "No shortcut is suspected among these concepts.",
        tuple(tiles),
        overview(found),
        tuple(
            _concept(found, finding, finding.association.concept in suspects) for finding in found.findings
        ),
        next_steps or {},
        _notes(found),
    )


def overview(found: Audit) -> Table:
    """One row per concept."""
    suspects = {finding.association.concept for finding in found.suspects}
    rows = []
    for finding in found.findings:
        about, used = finding.association, finding.reliance
        told = () if used is None else (percent(used.changed), percent(used.lost))
        figures = (f"{about.information:.2f}", f"{about.expected:.2f}", f"{about.p_value:.3f}")
        rows.append((about.concept, finding.title, *figures, *told))
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
        marked = _marked(found.roles, finding)
    return replace(
        plain, images=_by_class(found, finding), changed=_changed(found, finding), map=marked, heads=heads
    )


def _marked(roles: RoleMap, finding: Finding) -> HeadMap:
    """The map with every head gray but those of the concept."""
    drawn, chosen = head_map(roles), {f"{layer}-{head}" for layer, head in finding.heads}
    rows = tuple(
        (
            layer,
            tuple(
                cell if cell.key in chosen else replace(cell, color="#ececec", ink="#666666")
                for cell in cells
            ),
        )
        for layer, cells in drawn.rows
    )
    return replace(drawn, rows=rows, legend=())


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
    classes = found.method.classes
    for index in (after != found.answers).nonzero().flatten().tolist()[: 2 * _IMAGES]:
        truth = found.images.classes[int(found.images.labels[index])]
        answers = (classes[int(found.answers[index])], classes[int(after[index])])
        lines = tuple(
            ("right" if answer == truth else "wrong", f"{words} {answer}")
            for words, answer in zip(("with:", "without:"), answers, strict=True)
        )
        result.append(Thumbnail(thumbnail(found.images.image(index)), truth, (("name", truth), *lines)))
    return tuple(result)


def _notes(found: Audit) -> dict[str, str]:
    roles = "none" if found.roles is None else f"{len(found.roles)} heads, by the rule {found.roles.rule}"
    notes = {"images": found.images.name, "backbone": found.clip.name, "role map": roles}
    if found.method is not None:
        correction = found.method.clip.correction
        notes["removed before training"] = "nothing" if correction is None else correction.note
    return notes
