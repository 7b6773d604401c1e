"""Concepts that go with the labels only as a stronger concept does.

The word for *animal* that is nearest to an image of a letter goes with the label as the letter does. Such a
concept tells nothing about the label where the stronger concept's value is the same, and loses a good part of
its association when the stronger concept's directions are taken from the features. A second shortcut beside
the first may fail the first test (both have a value per class), but it lies in directions of its own and
passes the second: it stays suspected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from dear.heads.audit import (
    ASSOCIATED,
    EXPLAINED,
    SHORTCUT,
    Association,
    Finding,
    against_chance,
    seen_values,
)
from dear.heads.repair import span_basis

ADDS = 0.05  #: share of the labels' entropy that a concept must tell beyond the stronger one
LEFT = 0.7  #: of its association, without the stronger one's directions, that makes it one of its own
_PERMUTATIONS = 200


def explain_away(
    findings: Sequence[Finding],
    directions: Mapping[str, Tensor],
    features: Tensor,
    labels: Tensor,
    seed: int = 1,
) -> tuple[Finding, ...]:
    """The findings, with the verdict changed of suspects that only go with a stronger one.

    `directions` are T_q of each concept, [K, E]; image `features` are [n, E], `labels` int64 [n].
    """
    suspects = [one for one in findings if one.verdict in (SHORTCUT, ASSOCIATED)]
    suspects.sort(key=lambda one: -one.association.excess)
    changed: dict[str, Finding] = {}
    strong: list[Finding] = []
    for one in suspects:
        own = one.association
        for other in strong:
            name = other.association.concept
            adds = _beyond_chance(own.seen, labels, other.association.seen, seed)
            if adds >= ADDS:
                continue
            left = _left(own, directions[own.concept], directions[name], features, labels, seed)
            if left < LEFT:
                changed[own.concept] = _explained(one, name, adds, left)
                break
        else:
            strong.append(one)
    return tuple(changed.get(one.association.concept, one) for one in findings)


def _beyond_chance(values: Tensor, labels: Tensor, given: Tensor | None, seed: int) -> float:
    """What values tell about the labels, given another concept's values, beyond chance."""
    found, drawn = against_chance(values, labels, given, permutations=_PERMUTATIONS, seed=seed)
    return found - float(drawn.mean())


def _left(
    own: Association, directions: Tensor, removed: Tensor, features: Tensor, labels: Tensor, seed: int
) -> float:
    """Share of a concept's association that is left without the directions of another."""
    basis = span_basis(removed)
    wide = features.double()
    rest = wide - (wide - wide.mean(dim=0)) @ basis.T @ basis
    return _beyond_chance(seen_values(rest, directions), labels, None, seed) / max(own.excess, 1e-9)


def _explained(one: Finding, name: str, adds: float, left: float) -> Finding:
    own = one.association
    sentence = (
        f"{own.concept} goes with the labels only as {name} does: among images with the same {name} it tells "
        f"{max(adds, 0.0):.2f} more about the label than chance, and without the directions of {name} "
        f"{max(left, 0.0):.0%} of its association is left. Remove {name} first; {own.figures}."
    )
    return replace(one, verdict=EXPLAINED, sentence=sentence, explained_by=name)
