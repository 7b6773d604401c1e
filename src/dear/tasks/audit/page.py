"""The page of an audit: one table of findings, and the images behind each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from dear.data.images import ImageSet, label_text, values_of
from dear.errors import UsageError
from dear.report.head_map import HeadMap, head_map
from dear.report.page import Table, Thumbnail, percent, render, thumbnail
from dear.shortcuts.find import Shortcut
from dear.tasks.audit.findings import NOT_ASSOCIATED, ConceptFinding, Finding, PropertyFinding
from dear.tasks.audit.result import Audit
from dear.tasks.audit.several_labels import label_view, members
from dear.tasks.explain.explainer import Explainer
from dear.tasks.explain.explanation import Explanation, Explanations
from dear.tasks.explain.scores import ScoreParts
from dear.utils.files import PathLike, write_atomic
from dear.utils.notices import note
from dear.utils.progress import Progress

TERMS = {
    "property": "a number measured in each image, whatever the image shows: brightness, sharpness, a color "
    "cast, a frame; or a mark at the same place in all images of a class",
    "score": "how well one property separates the class from all other images (area under the ROC curve: 0.5 "
    "not at all, 1 without error); for marks, how much less the images of the class vary there than others",
    "concept": "something that images differ in other than their class, such as the background; its values "
    "are words",
    "value": "the word of a concept that the frozen model finds nearest to an image",
    "information": "how much the value reveals about the label: 0 nothing, 1 everything (mutual information "
    "over the entropy of the labels)",
    "required": "the information that a concept must reach to count as associated: 0.05 more than random "
    "directions of the features, and at least 0.10 more than shuffled labels",
    "effect on the model": "the share of answers that change, and of the margin (the lead of the right "
    "answer over the next one) that is lost, when the concept is removed from the image feature; it matters "
    "for concepts that are associated with the labels",
    "shortcut": "associated with the labels, and the model relies on it: without it at least 5% of the "
    "answers change or half of the margin is lost; for a property, an edit moves answers to the class",
    "shifts scores only": "associated with the labels; without it scores change, but hardly any answer",
    "class-defining": "associated with the labels, but the class names differ in it as well",
    "group": "images of one class with one value",
}
_IMAGES, _CLASSES, _VALUES, _PAIRS = 6, 8, 12, 40
_EXPLAINED = 6  # images per concept on the page that explains them


def write_pages(audit: Audit, out: PathLike, progress: Progress) -> None:
    """Write the page of an audit, and where a model was tested a second one that explains changed answers."""
    links = _write_explanations(audit, out, progress)
    write_atomic(out, audit_page(audit, links))


def audit_page(audit: Audit, links: Mapping[str, str] | None = None) -> str:
    """The page as HTML text; `links` are addresses of explained answers by concept."""
    page = AuditPage(audit, links or {})
    return render("audit.html", title=f"Audit of {audit.images.name}", audit=audit, page=page, terms=TERMS)


def summary_html(audit: Audit) -> str:
    """Verdict and findings as HTML, for notebooks and the demo; concepts without association in one line."""
    others = [one.name for one in audit.findings if one.verdict == NOT_ASSOCIATED]
    return render("audit_summary.html", audit=audit, page=AuditPage(audit, {}), others=others)


def _write_explanations(audit: Audit, out: PathLike, progress: Progress) -> dict[str, str]:
    """Explain some answers that change without each suspected concept; addresses by concept.

    The page has the name of the audit's with `-why` added.
    """
    chosen = {
        one: places
        for one in audit.concepts
        if one.suspected and (places := audit.changed_places(one)[:_EXPLAINED])
    }
    if audit.model is None or not chosen:
        return {}
    images = audit.held_out or audit.images
    page = Path(out).with_name(f"{Path(out).stem}-why.html")
    links: dict[str, str] = {}
    items: list[Explanation] = []
    try:
        explainer = Explainer(ScoreParts(audit.model, audit.images, audit.roles, progress=progress))
        for one, places in chosen.items():
            links[one.name] = f"{page.name}#image-{len(items) + 1}"
            label = one.association.label or None
            items += explainer.explain(images.subset(places), label, progress=progress)
    except UsageError as error:
        note(f"no page of explanations: {error}")
        return {}
    Explanations(tuple(items), explainer.method.title, explainer.notes()).write_page(page)
    return links


def finding_table(audit: Audit, findings: Sequence[Finding]) -> Table:
    """One row per finding, image properties and concepts alike."""
    rows = []
    for one in findings:
        if isinstance(one, PropertyFinding):
            shortcut, test = one.shortcut, one.test
            effect = (
                "" if test is None else f"{percent(test.plain)} → {percent(test.edited)} of edited images"
            )
            name, strength = f"{shortcut.class_name}: {shortcut.look}", f"score {shortcut.score:.2f}"
        else:
            about, used = one.association, one.reliance
            effect = "" if used is None else f"{percent(used.changed)} of answers change"
            if used is not None and used.shifts:
                effect += f", {percent(used.lost)} of the margin is lost"
            name, strength = one.name, about.summary
        rows.append((name, one.title, strength, effect))
    marks = tuple("best" if one.suspected else "" for one in findings)
    columns = ("finding", "verdict", "association with the labels", "effect on the model")
    shown = 4 if audit.model is not None else 3
    return Table(columns[:shown], tuple(row[:shown] for row in rows), labels=shown, classes=marks)


class AuditPage:
    """What the template shows of an audit; galleries are made when the template asks for them."""

    def __init__(self, audit: Audit, links: Mapping[str, str]) -> None:
        self.audit, self.links = audit, links

    @property
    def lead(self) -> str:
        """What was audited, in one sentence."""
        audit = self.audit
        what = f"{len(audit.images)} images of {audit.images.name}"
        if audit.model is not None:
            where = "these images" if audit.held_out is None else f"{len(audit.held_out)} held-out images"
            what += f", and a model ({audit.model.method.title}) tested on {where}"
        return what + ("." if audit.clip is None else f", with the backbone {audit.clip.name}.")

    @property
    def tiles(self) -> list[tuple[str, str]]:
        """(figure, words) at the top."""
        audit, count = self.audit, len(self.audit.suspects)
        words = "suspected shortcut" if audit.model is not None else "finding to act on"
        words = words if count == 1 else words.replace("finding", "findings").replace("shortcut", "shortcuts")
        tiles = [(str(len(audit.images)), "images"), (str(len(audit.images.classes)), "classes")]
        tiles.append((str(count), words))
        if audit.check is not None and audit.check.duplicates:
            tiles.append((str(len(audit.check.duplicates)), "pairs of near duplicates"))
        if audit.worst_group is not None:
            tiles.append((percent(audit.worst_group[1]), f"in the worst group: {audit.worst_group[0]}"))
        return tiles

    @property
    def table(self) -> Table:
        """One row per finding, without concepts that are not associated with the labels."""
        return finding_table(
            self.audit, [one for one in self.audit.findings if one.verdict != NOT_ASSOCIATED]
        )

    @property
    def detailed(self) -> list[Finding]:
        """Findings with images: all properties up to a number, and suspected concepts."""
        properties = self.audit.properties[:_CLASSES]
        return [one for one in self.audit.findings if one in properties or one.suspected]

    def is_concept(self, one: Finding) -> bool:
        """Whether a finding is a concept."""
        return isinstance(one, ConceptFinding)

    @property
    def duplicates(self) -> Table | None:
        """Pairs of near duplicates; None: there are none."""
        check = self.audit.check
        if check is None or not check.duplicates:
            return None
        rows = tuple((pair.first, pair.second, pair.where) for pair in check.duplicates[:_PAIRS])
        return Table(("image", "near duplicate", "in"), rows, labels=3)

    @property
    def notes(self) -> dict[str, str]:
        """How the audit was made."""
        audit = self.audit
        roles = "none" if audit.roles is None else f"{len(audit.roles)} heads, by the rule {audit.roles.rule}"
        backbone = "none: only image properties were measured" if audit.clip is None else audit.clip.name
        notes = {"images": audit.images.name, "backbone": backbone, "role map": roles}
        if audit.check is not None and audit.check.compared is not None:
            notes["near duplicates"] = f"{audit.check.compared} test images compared with all training images"
        if audit.model is not None:
            correction = audit.model.clip.correction
            notes["removed before training"] = "nothing" if correction is None else correction.note
        return notes

    def mark_map(self, one: PropertyFinding) -> Thumbnail | None:
        """Where a mark is; None for other properties."""
        return mark_map(one.shortcut)

    def property_images(self, one: PropertyFinding) -> dict[str, tuple[Thumbnail, ...]]:
        """Images of the class with the clearest values, and the other images nearest to them."""
        images, shortcut = self.audit.images, one.shortcut
        assert self.audit.check is not None
        has = members(images, shortcut.label).numpy()
        in_class, others = np.flatnonzero(has), np.flatnonzero(~has)
        column = self.audit.check.measured.find_column(shortcut.name)
        if shortcut.values is not None and column is not None:
            sign = 1 if shortcut.values[0] >= shortcut.values[1] else -1
            in_class = in_class[np.argsort(-sign * column[in_class])]
            others = others[np.argsort(-sign * column[others])]
        shown = {f"{shortcut.class_name}, clearest first": in_class}
        if shortcut.mark is None:
            shown["Other images that come nearest"] = others
        return {
            heading: tuple(_small(images, int(row)) for row in rows[:_IMAGES])
            for heading, rows in shown.items()
        }

    def value_table(self, one: ConceptFinding) -> Table:
        """Images per class and value."""
        about = one.association
        order = about.table.sum(dim=0).argsort(descending=True).tolist()[:_VALUES]
        order = [value for value in order if int(about.table[:, value].sum()) > 0]
        rows = [
            (name, *(str(int(about.table[label, value])) for value in order))
            for label, name in enumerate(_view(self.audit.images, one).classes)
        ]
        return Table(("class", *(about.words[value] for value in order)), tuple(rows))

    def concept_images(self, one: ConceptFinding) -> dict[str, tuple[Thumbnail, ...]]:
        """Some images of every class: those with its usual value first, then the others."""
        images, about, galleries = _view(self.audit.images, one), one.association, {}
        groups = values_of(images)

        def small(index: int, name: str) -> Thumbnail:
            value = about.words[int(about.values[index])]
            known = value if groups is None else groups[index]
            group = () if known == value else (("soft", f"group {known}"),)
            return Thumbnail(thumbnail(images.image(index)), f"{name}, {value}", (("name", value), *group))

        for label, name in enumerate(images.classes[:_CLASSES]):
            members = (images.labels == label).nonzero().flatten().tolist()
            if not members:
                continue
            usual = int(about.table[label].argmax())
            share = int(about.table[label, usual]) / len(members)
            same = [index for index in members if int(about.values[index]) == usual]
            other = [index for index in members if int(about.values[index]) != usual]
            shown = same[: _IMAGES - min(2, len(other))] + other[:2]
            heading = f"{name}: {about.words[usual]} in {percent(share)} of its images"
            galleries[heading] = tuple(small(index, name) for index in shown)
        return galleries

    def changed_answers(self, one: ConceptFinding) -> tuple[Thumbnail, ...]:
        """Images whose answer changes without the concept, with both answers."""
        audit, shown, answers = self.audit, [], self.audit.answer_words(one)
        images = audit.held_out or audit.images
        for index in sorted(audit.changed_places(one))[: 2 * _IMAGES]:
            truth, *both = answers[index]
            lines = [("name", truth)]
            for words, answer in zip(("with:", "without:"), both, strict=True):
                lines.append(("right" if answer == truth else "wrong", f"{words} {answer}"))
            shown.append(Thumbnail(thumbnail(images.image(index)), truth, tuple(lines)))
        return tuple(shown)

    def head_map(self, one: ConceptFinding) -> HeadMap | None:
        """The heads with the role of the concept; None where there are none."""
        roles = self.audit.roles
        return None if roles is None or not one.heads else head_map(roles, only=one.heads)

    def heads(self, one: ConceptFinding) -> str:
        """The same in words; empty without a role map."""
        if self.audit.roles is None:
            return ""
        if not one.heads:
            return "No head of the role map has this role."
        names = ", ".join(f"layer {layer} head {head}" for layer, head in one.heads)
        concept = one.association.concept
        return f"{len(one.heads)} heads have the role {concept}: {names}. The others are gray."


def _view(images: ImageSet, one: ConceptFinding) -> ImageSet:
    """The images with the labels that a finding is about."""
    label = one.association.label
    return label_view(images, images.classes.index(label)) if label else images


def _small(images: ImageSet, place: int) -> Thumbnail:
    """The whole image on a square: a gallery would cut off corners, where frames and stamps are."""
    name = label_text(images, place)
    image = images.image(place)
    square = ImageOps.pad(image, (max(image.size),) * 2, color=(225, 225, 225))
    return Thumbnail(thumbnail(square), name, (("name", name),))


def mark_map(one: Shortcut) -> Thumbnail | None:
    """A mark in its colors on gray: where all images of the class agree; None for other properties."""
    if one.mark is None:
        return None
    pixels = np.full((*one.mark.mask.shape, 3), 225, dtype=np.uint8)
    pixels[one.mark.mask] = one.mark.look[one.mark.mask]
    drawn = Image.fromarray(pixels).resize((144, 144), Image.Resampling.NEAREST)
    text = f"where images of {one.class_name} agree: {one.mark.place}"
    return Thumbnail(thumbnail(drawn), text, (("name", one.mark.place),))
