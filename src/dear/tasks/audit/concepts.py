"""Is a concept a shortcut? Association with the labels, reliance of a model, and what the classes are about.

Method page, section 4. The value of a concept in an image is the one whose words the frozen model finds
nearest; no group labels are needed. A shortcut is suspected when the values go with the labels more than
chance allows, the model relies on the concept, and the class names themselves do not differ in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.errors import UsageError
from dear.heads.names import Head
from dear.shortcuts.removal import span_basis

PERMUTATIONS = 1000
CERTAIN = 0.05  #: probability of any false association among all concepts that were looked at
STRONG = 0.10  #: excess of normalized mutual information that counts
NATURAL = 0.05  #: excess beyond that of as many random directions of the features
DRAWS = 8  #: of random directions
ONE_CLASS = 0.90  #: share of a class's images with a value, less that of the others, that counts
ABOUT = 2.0  #: class names differ in the concept this many times as much as in as many random directions
ADDS = 0.05  #: share of the labels' entropy that a concept must tell beyond the stronger one
LEFT = 0.7  #: of its association, without the stronger one's directions, that makes it one of its own
RELIES = 0.05  #: share of the margin, or of the answers, that goes with the concept

SHORTCUT, ASSOCIATED, EXPLAINED, UNUSED, ABOUT_CLASSES, NONE = (
    "shortcut", "associated", "goes with another", "unused", "about the classes", "none"
)  # fmt: skip
"""Verdicts: suspected shortcut; associated (no model was tested); the same, but only as a stronger concept is
(`explain_away`); associated but not used; what the classes are about; not associated."""


@dataclass(frozen=True, eq=False)
class Association:
    """How the values of a concept go with the labels."""

    concept: str  #: its name
    words: tuple[str, ...]  #: its values
    seen: Tensor  #: int64 [n], place in `words` of the value that the frozen model sees in each image
    table: Tensor  #: int64 [C, K], images per class and value
    information: float  #: mutual information of value and label over the entropy of the labels, 0 to 1
    expected: float  #: the same when labels are dealt out at random, mean over the permutations
    p_value: float  #: how often random labels do as well
    about: float  #: how much the class names differ in the concept, relative to as many random directions
    #: excess of as many random directions of these features: what classes differ in anyway
    natural: float = 0.0
    #: (class, value, share less that of the others) where a value is one class's own and the class's name
    #: does not say so; None: there is none
    one_class: tuple[int, int, float] | None = None

    @property
    def excess(self) -> float:
        """Normalized mutual information beyond chance."""
        return self.information - self.expected

    @property
    def strong(self) -> bool:
        """Whether the labels as a whole go with the concept, more than with other directions."""
        return self.excess >= max(STRONG, self.natural + NATURAL)

    @property
    def figures(self) -> str:
        """For people."""
        return (
            f"normalized mutual information {self.information:.2f} (by chance {self.expected:.2f}, "
            f"p = {self.p_value:.3f})"
        )


@dataclass(frozen=True)
class Reliance:
    """What becomes of a model's answers when a concept is removed, without training again."""

    changed: float  #: share of answers that change
    margin: float  #: mean of the true class's score minus the best other's, before
    margin_without: float  #: the same with the concept removed
    way: str = "words"  #: how it was removed

    @property
    def lost(self) -> float:
        """Share of the margin that goes with the concept; 0 where the margin grows."""
        return max(0.0, (self.margin - self.margin_without) / max(abs(self.margin), 1e-9))

    @property
    def sentence(self) -> str:
        """What becomes of the answers, in a few words."""
        changed = f"without it {self.changed:.1%} of the answers change"
        return f"{changed} and the margin falls by {self.lost:.1%}" if self.lost >= 0.005 else changed

    @property
    def relies(self) -> bool:
        """Whether the model uses the concept to a degree that matters."""
        return max(self.lost, self.changed) >= RELIES


@dataclass(frozen=True, eq=False)
class Finding:
    """What an audit says of one concept."""

    association: Association  #: with the labels
    reliance: Reliance | None  #: of the model; None where no model was tested
    heads: tuple[Head, ...]  #: the heads with that role
    verdict: str  #: one of the verdicts above
    sentence: str  #: the verdict for people
    explained_by: str = ""  #: the stronger concept that it goes with; empty: none

    @property
    def title(self) -> str:
        """The verdict in a few words: "shortcut", "goes with Text"."""
        return f"goes with {self.explained_by}" if self.explained_by else self.verdict


def mutual_information(values: Tensor, labels: Tensor, kinds: int, classes: int) -> Tensor:
    """Mutual information in nats of values [n] and each row of labels [P, n].

    >>> mutual_information(torch.tensor([0, 0, 1, 1]), torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]]), 2, 2)
    tensor([0.6931, 0.0000], dtype=torch.float64)
    """
    cells = labels * kinds + values  # [P, n]
    counts = torch.zeros(len(labels), classes * kinds, dtype=torch.float64)
    counts.scatter_add_(1, cells, torch.ones_like(cells, dtype=torch.float64))
    joint = counts.view(-1, classes, kinds) / labels.shape[1]
    product = joint.sum(2, keepdim=True) * joint.sum(1, keepdim=True)
    return torch.where(joint > 0, joint * (joint / product.clamp(min=1e-300)).log(), 0.0).sum((1, 2))


def associate(
    concept: str,
    words: Sequence[str],
    directions: Tensor,
    features: Tensor,
    labels: Tensor,
    class_features: Tensor,
    permutations: int = PERMUTATIONS,
    seed: int = 1,
) -> Association:
    """Association of a concept with K values (`words`) with the labels, by a permutation test.

    `directions` are T_q, features of the values [K, E]; image `features` are [n, E], `labels` int64 [n],
    features of the classes' prompts [C, E].
    """
    if len(class_features) < 2:
        raise UsageError("an association needs images of at least two classes")
    classes, kinds = len(class_features), len(words)
    seen, labels = seen_values(features, directions), labels.to(torch.int64)
    found, drawn = against_chance(seen, labels, permutations=permutations, seed=seed)
    table = torch.bincount(labels * kinds + seen, minlength=classes * kinds).view(classes, kinds)
    return Association(
        concept,
        tuple(words),
        seen,
        table,
        found,
        float(drawn.mean()),
        (1 + int((drawn >= found - 1e-12).sum())) / (1 + permutations),
        about_classes(directions, class_features),
        natural_information(features, labels, kinds, seed),
        one_class(table, seen_values(class_features, directions)),
    )


def natural_information(features: Tensor, labels: Tensor, kinds: int, seed: int = 1) -> float:
    """What as many random directions of the features tell about the labels beyond chance, mean of draws.

    Directions are drawn with the covariance of the features: images of different classes differ in almost
    any of them, so a concept that tells no more is no finding.
    """
    centered = features.float() - features.float().mean(dim=0)
    found = []
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(seed * DRAWS + draw)
        rows = F.normalize(torch.randn(kinds, len(features), generator=generator) @ centered, dim=-1)
        scores = centered @ rows.T  # [n, K]
        values = (scores / scores.std(dim=0).clamp(min=1e-12)).argmax(dim=1)
        found.append(_beyond_chance(values, labels, None, seed, permutations=20))
    return sum(found) / len(found)


def one_class(table: Tensor, named: Tensor) -> tuple[int, int, float] | None:
    """The class and the value of its own in a table [C, K]; `named` [C] are values that class names say.

    >>> one_class(torch.tensor([[9, 1], [0, 10], [0, 10]]), torch.tensor([1, 1, 1]))
    (0, 0, 0.9)
    >>> one_class(torch.tensor([[9, 1], [0, 10], [0, 10]]), torch.tensor([0, 1, 1])) is None
    True
    """
    counts = table.double()
    own = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    rest = counts.sum(dim=0) - counts
    gap = own - rest / rest.sum(dim=1, keepdim=True).clamp(min=1)
    gap[torch.arange(len(gap)), named] = -1.0
    label, value = divmod(int(gap.argmax()), gap.shape[1])
    score = round(float(gap[label, value]), 6)
    return (label, value, score) if score >= ONE_CLASS and len(table) > 2 else None


def seen_values(features: Tensor, directions: Tensor) -> Tensor:
    """Row of `directions` [K, E] that each image [n, E] is nearest to: int64 [n]."""
    return (F.normalize(features.float(), dim=-1) @ F.normalize(directions.float(), dim=-1).T).argmax(dim=1)


def against_chance(
    values: Tensor,
    labels: Tensor,
    given: Tensor | None = None,
    permutations: int = PERMUTATIONS,
    seed: int = 1,
) -> tuple[float, Tensor]:
    """What values [n] tell about labels [n], and the same for labels dealt out at random [P].

    In shares of the labels' entropy. With `given` [n], what the values tell beyond that: random labels are
    then dealt out among images that have it in common.
    """
    values, labels = (part.unique(return_inverse=True)[1] for part in (values, labels))
    within = torch.zeros_like(labels) if given is None else given.unique(return_inverse=True)[1]
    both = (values * (int(within.max()) + 1) + within).unique(return_inverse=True)[1]
    kinds, groups, classes = (int(part.max()) + 1 for part in (both, within, labels))

    def beyond(rows: Tensor) -> Tensor:
        both_together = mutual_information(both, rows, kinds, classes)
        return both_together - mutual_information(within, rows, groups, classes)

    generator, own = torch.Generator().manual_seed(seed), within.argsort(stable=True)
    drawn, at_once = [], max(1, 2_000_000 // max(len(labels), kinds * classes))
    for start in range(0, permutations, at_once):
        shape = (min(at_once, permutations - start), len(labels))
        keys = torch.rand(shape, generator=generator, dtype=torch.float64)
        rows = torch.empty(keys.shape, dtype=torch.int64)
        rows[:, own] = labels[(keys + within).argsort(dim=1)]  # keys are below 1: groups stay together
        drawn.append(beyond(rows))
    share = torch.bincount(labels).double() / len(labels)
    entropy = max(float(-(share * share.clamp(min=1e-300).log()).sum()), 1e-12)
    return float(beyond(labels[None])) / entropy, torch.cat(drawn) / entropy


def about_classes(directions: Tensor, class_features: Tensor) -> float:
    """Share of the class names' variance in the concept's span, over the span's share of all directions."""
    basis = span_basis(directions)
    rows = F.normalize(class_features.double(), dim=-1)
    rows = rows - rows.mean(dim=0)
    total = float((rows**2).sum())
    inside = float(((rows @ basis.T) ** 2).sum())
    return inside / max(total, 1e-12) / (len(basis) / rows.shape[1])


def reliance(before: Tensor, after: Tensor, labels: Tensor, way: str = "words") -> Reliance:
    """Reliance from scores [n, C] before and after the concept's removal."""
    return Reliance(
        float((before.argmax(dim=1) != after.argmax(dim=1)).double().mean()),
        margin(before, labels),
        margin(after, labels),
        way,
    )


def margin(scores: Tensor, labels: Tensor) -> float:
    """Mean of the true class's score minus the best other's.

    >>> margin(torch.tensor([[3.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    0.5
    """
    own = scores.gather(1, labels[:, None])
    other = scores.scatter(1, labels[:, None], -math.inf).amax(dim=1, keepdim=True)
    return float((own - other).double().mean())


def judge(
    association: Association,
    reliance: Reliance | None,
    heads: Sequence[Head] = (),
    concepts: int = 12,
    classes: Sequence[str] = (),
) -> Finding:
    """The verdict on one of `concepts` concepts that were looked at, and its sentence."""
    found = _verdict(association, reliance, concepts)
    sentence = _sentence(found, association, reliance, association.p_value * concepts <= CERTAIN, classes)
    return Finding(association, reliance, tuple(heads), found, sentence)


def _verdict(association: Association, reliance: Reliance | None, concepts: int) -> str:
    """The permutation test is corrected for how many concepts were looked at (Bonferroni)."""
    if association.p_value * concepts > CERTAIN:
        return NONE
    if not association.strong:
        return NONE if association.one_class is None else ASSOCIATED
    if association.about >= ABOUT:
        return ABOUT_CLASSES
    if reliance is None:
        return ASSOCIATED
    return SHORTCUT if reliance.relies else UNUSED


def _sentence(
    verdict: str, association: Association, reliance: Reliance | None, certain: bool, classes: Sequence[str]
) -> str:
    name, figures = association.concept, association.figures
    if verdict == ASSOCIATED and not association.strong and association.one_class is not None:
        label, value, share = association.one_class
        return (
            f"{name}: images of {classes[label] if classes else f'class {label}'} are seen as "
            f"{association.words[value]!r} {share:.1%} more often than the others, and the class's name does "
            "not say so: a model may answer by it."
        )
    if verdict == NONE and certain and association.excess >= STRONG:
        return (
            f"{name} tells the classes no better than other directions of these images do "
            f"({association.natural:.2f} beyond chance): {figures}."
        )
    changed = "" if reliance is None else reliance.sentence
    return {
        NONE: f"{name} does not go with the labels: {figures}.",
        ABOUT_CLASSES: f"{name} goes with the labels, and the class names differ in it, too "
        f"({association.about:.1f} times as much as in random directions): it is what the classes are about, "
        f"or this backbone cannot tell the two apart; {figures}.",
        ASSOCIATED: f"{name} goes with the labels although the class names do not differ in it: a model "
        f"trained on these images may answer by it; {figures}.",
        UNUSED: f"{name} goes with the labels, but the model does not rely on it: {changed}; {figures}.",
        SHORTCUT: f"{name} is a suspected shortcut: it goes with the labels although the class names do not "
        f"differ in it, and {changed}; {figures}.",
    }[verdict]


def explain_away(
    findings: Sequence[Finding],
    directions: Mapping[str, Tensor],
    features: Tensor,
    labels: Tensor,
    seed: int = 1,
) -> tuple[Finding, ...]:
    """The findings, with the verdict changed of concepts that go with the labels only as a stronger one does.

    The word for *animal* that is nearest to an image of a letter goes with the label as the letter does. Such
    a concept tells nothing about the label where the stronger concept's value is the same, and loses a good
    part of its association when the stronger concept's directions are taken from the features. A second
    shortcut beside the first may fail the first test (both have a value per class), but it lies in directions
    of its own and passes the second: it stays suspected. `directions` are T_q of each concept, [K, E].
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


def _beyond_chance(
    values: Tensor, labels: Tensor, given: Tensor | None, seed: int, permutations: int = 200
) -> float:
    """What values tell about the labels, given another concept's values, beyond chance."""
    found, drawn = against_chance(values, labels, given, permutations, seed)
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
