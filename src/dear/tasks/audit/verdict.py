"""Is a concept a shortcut? The verdict, and its sentence.

A shortcut is suspected when the concept's values are associated with the labels more closely than chance and
random directions allow, the model relies on the concept, the class names do not differ in it, and no stronger
concept explains the association.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from dear.heads.names import Head
from dear.shortcuts.removal import span_basis
from dear.tasks.audit.association import Association, information_excess, nearest_values
from dear.tasks.audit.findings import (
    ASSOCIATED,
    CLASS_DEFINING,
    EXPLAINED,
    NOT_ASSOCIATED,
    SHIFTS,
    SHORTCUT,
    SUSPECTED,
    UNUSED,
    ConceptFinding,
)
from dear.tasks.audit.reliance import Reliance

FALSE_ALARM_RATE = 0.05  #: probability of any false association among all concepts
MIN_CLASS_NAME_RATIO = 2.0  #: variance of the class names in the concept's span, relative to a random span
MIN_ADDED_INFO = 0.05  #: share of the labels' entropy that a concept adds to a stronger one
MIN_REMAINING_ASSOCIATION = 0.7  #: share left after projecting out the stronger concept


def judge(
    association: Association,
    reliance: Reliance | None,
    heads: Sequence[Head] = (),
    concepts: int = 12,
    classes: Sequence[str] = (),
) -> ConceptFinding:
    """The verdict on one of `concepts` concepts of an audit, and its sentence."""
    limit = FALSE_ALARM_RATE / concepts  # Bonferroni
    verdict = _verdict(association, reliance, association.p_value <= limit)
    sentence = _sentence(verdict, association, reliance, limit, classes)
    return ConceptFinding(association, reliance, tuple(heads), verdict, sentence)


def _verdict(association: Association, reliance: Reliance | None, certain: bool) -> str:
    if not certain or not (association.strong or association.one_class):
        return NOT_ASSOCIATED
    if association.strong and association.class_name_ratio >= MIN_CLASS_NAME_RATIO:
        return CLASS_DEFINING
    if reliance is None:
        return ASSOCIATED
    if reliance.relies:
        return SHORTCUT
    return SHIFTS if reliance.shifts else UNUSED


def _sentence(
    verdict: str, association: Association, reliance: Reliance | None, limit: float, classes: Sequence[str]
) -> str:
    name, figures = association.name, association.figures
    if verdict == NOT_ASSOCIATED:
        if association.p_value <= limit:
            return f"{name} is not associated with the labels: {figures}."
        return (
            f"{name} is not associated with the labels: normalized mutual information "
            f"{association.information:.2f}, shuffled labels reach {association.expected:.2f} "
            f"(p = {association.p_value:.3f}; at most {limit:.3f} is required because several concepts are "
            "tested)."
        )
    if verdict == CLASS_DEFINING:
        return (
            f"{name} is associated with the labels, and the class names differ in it as well "
            f"({association.class_name_ratio:.1f} times as much as in random directions), so it probably "
            f"defines the classes: {figures}."
        )
    if association.strong:
        what = (
            f"{name} is associated with the labels although the class names do not differ in it ({figures})"
        )
    else:
        assert association.one_class is not None
        label, value, gap = association.one_class
        what = (
            f"{name}: {association.words[value]!r} is {100 * gap:.0f} points more frequent in images of "
            f"{classes[label] if classes else f'class {label}'} than in others, and the class name does not "
            "imply it"
        )
    if reliance is None:
        return f"{what}. A model trained on these images may rely on it."
    if verdict == SHORTCUT:
        return f"{what}. The model relies on it: {reliance.sentence}."
    if verdict == SHIFTS:
        changes = "changes no answer" if reliance.changed == 0 else "changes hardly any answer"
        return f"{what}. It shifts scores, but {changes}: {reliance.sentence}."
    return f"{what}. The model does not rely on it: {reliance.sentence}."


def explain_away(
    findings: Sequence[ConceptFinding],
    directions: Mapping[str, Tensor],
    features: Tensor,
    labels: Tensor,
    seed: int = 1,
) -> tuple[ConceptFinding, ...]:
    """Change the verdict on concepts that are associated with the labels only as far as a stronger one is.

    The word for *animal* that is nearest to an image of a letter is associated with the label as the letter
    is. Such a concept adds no information about the label among images with the same value of the stronger
    concept, and loses much of its association when the stronger concept's directions are projected out. A
    second shortcut next to the first may fail the first test (both have a value per class), but it lies in
    other directions and passes the second: it stays suspected. `directions` are T_q of each concept, [K, E].
    """
    suspects = [one for one in findings if one.verdict in SUSPECTED]
    suspects.sort(key=lambda one: -one.association.excess)
    changed: dict[str, ConceptFinding] = {}
    # What defines a label is shared by all its images, so other concepts may be associated through it alone.
    strong = [one for one in findings if one.association.label and one.verdict == CLASS_DEFINING]
    for one in suspects:
        for other in strong:
            added = information_excess(one.association.values, labels, other.association.values, seed)
            if added >= MIN_ADDED_INFO:
                continue
            remaining = _remaining_association(
                one.association, directions[one.name], directions[other.name], features, labels, seed
            )
            if remaining < MIN_REMAINING_ASSOCIATION:
                changed[one.name] = _explained_by(one, other.name, added, remaining)
                break
        else:
            strong.append(one)
    return tuple(changed.get(one.name, one) for one in findings)


def _remaining_association(
    association: Association,
    directions: Tensor,
    removed: Tensor,
    features: Tensor,
    labels: Tensor,
    seed: int,
) -> float:
    """Share of a concept's association that remains without the directions of another."""
    basis = span_basis(removed)
    wide = features.double()
    rest = wide - (wide - wide.mean(dim=0)) @ basis.T @ basis
    return information_excess(nearest_values(rest, directions), labels, None, seed) / max(
        association.excess, 1e-9
    )


def _explained_by(one: ConceptFinding, name: str, added: float, remaining: float) -> ConceptFinding:
    sentence = (
        f"{one.name} is associated with the labels through {name}: among images with the same {name} it adds "
        f"{max(added, 0.0):.2f} to the normalized mutual information, and without the directions of {name} "
        f"{max(remaining, 0.0):.0%} of its association remains. Remove {name} first."
    )
    return replace(one, verdict=EXPLAINED, sentence=sentence, explained_by=name)
