"""Is a concept a shortcut? Its association with the labels and the class names, and a model's reliance on it.

Method page, section 4. The value of a concept in an image is the one whose words the frozen model finds
nearest; no group labels are needed. A shortcut is suspected when the values are associated with the labels
more closely than chance and random directions allow, the model relies on the concept, and the class names do
not differ in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.data.folds import feature_order
from dear.errors import UsageError
from dear.heads.names import Head
from dear.shortcuts.removal import span_basis
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

PERMUTATIONS = 1000
FALSE_ALARM_RATE = 0.05  #: probability of any false association among all concepts
MIN_ASSOCIATION = 0.10  #: normalized mutual information above that of shuffled labels
MIN_ABOVE_RANDOM = 0.05  #: the same above that of random directions of the features
RANDOM_DRAWS = 32
GAP_DRAWS = 50  #: of random directions, none of which may reach the gap of a class
MIN_CLASS_GAP = 0.90  #: share of a class's images with a value, minus that of all other images
MIN_CLASS_NAME_RATIO = 2.0  #: variance of the class names in the concept's span, relative to a random span
MIN_ADDED_INFO = 0.05  #: share of the labels' entropy that a concept adds to a stronger one
MIN_REMAINING_ASSOCIATION = 0.7  #: share left after projecting out the stronger concept
MIN_RELIANCE = 0.05  #: share of the answers that change without the concept
#: share of the margin that depends on the concept; from one half on, the mean margin is negative where the
#: concept speaks for another class, which held-out images with the same shortcut do not show
MIN_MARGIN_RELIANCE = 0.5
MIN_SHIFT = 0.05  #: share of the margin from which on scores count as shifted


@dataclass(frozen=True, eq=False)
class Association:
    """How the values of a concept are associated with the labels."""

    concept: str  #: its name
    words: tuple[str, ...]  #: its values
    values: Tensor  #: int64 [n], index into `words` of the value that the frozen model sees in each image
    table: Tensor  #: int64 [C, K], images per class and value
    information: float  #: mutual information of value and label over the entropy of the labels, 0 to 1
    expected: float  #: the same for shuffled labels, mean over the permutations
    p_value: float  #: share of shuffled labels with at least as much information
    class_name_ratio: float  #: variance of the class names in the concept's span, relative to a random span
    random_excess: float = 0.0  #: `excess` of as many random directions of these features, mean of draws
    #: (class, value, gap) where nearly all images of one class have a value that hardly any other image has,
    #: that the class name does not imply, and that random directions do not reach; None: there is none
    one_class: tuple[int, int, float] | None = None
    label: str = ""  #: of several labels: the one that is compared with its absence; else empty

    @property
    def name(self) -> str:
        """The concept, after the label that it is associated with."""
        return f"{self.label}: {self.concept}" if self.label else self.concept

    @property
    def excess(self) -> float:
        """Normalized mutual information above that of shuffled labels."""
        return self.information - self.expected

    @property
    def required(self) -> float:
        """Normalized mutual information from which on the concept counts as associated."""
        return self.expected + max(MIN_ASSOCIATION, self.random_excess + MIN_ABOVE_RANDOM)

    @property
    def strong(self) -> bool:
        """Whether the labels as a whole are associated with the concept, beyond random directions."""
        return self.information >= self.required

    @property
    def summary(self) -> str:
        """The figure that decided, in a few words."""
        if self.one_class is not None and not self.strong:
            _, value, gap = self.one_class
            return f"{self.words[value]!r} in one class, +{100 * gap:.0f} points"
        return f"information {self.information:.2f} (required {self.required:.2f})"

    @property
    def figures(self) -> str:
        """The association and the criterion, for people."""
        reached = self.expected + self.random_excess
        return (
            f"normalized mutual information {self.information:.2f}; {self.required:.2f} is required, because "
            f"random directions of the same number reach {reached:.2f} and shuffled labels "
            f"{self.expected:.2f}"
        )


@dataclass(frozen=True)
class Reliance:
    """How a model's answers change when a concept is removed, without training again."""

    changed: float  #: share of answers that change
    margin: float  #: mean of the true class's score minus the best other score, before
    margin_without: float  #: the same with the concept removed
    way: str = "words"  #: how it was removed

    @property
    def lost(self) -> float:
        """Share of the margin that depends on the concept; 0 where the margin grows."""
        return max(0.0, (self.margin - self.margin_without) / max(abs(self.margin), 1e-9))

    @property
    def sentence(self) -> str:
        """The change in a few words."""
        changed = f"without it {self.changed:.1%} of the answers change"
        return f"{changed} and the margin falls by {self.lost:.1%}" if self.lost >= 0.005 else changed

    @property
    def strength(self) -> float:
        """The larger of changed answers and lost margin, each relative to what is required; 1 is enough."""
        return max(self.changed / MIN_RELIANCE, self.lost / MIN_MARGIN_RELIANCE)

    @property
    def relies(self) -> bool:
        """Whether answers depend on the concept: some change, or half of the margin is lost without it."""
        return self.strength >= 1

    @property
    def shifts(self) -> bool:
        """Whether scores depend on the concept, but hardly any answer does."""
        return not self.relies and self.lost >= MIN_SHIFT


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
    values, labels = nearest_values(features, directions), labels.to(torch.int64)
    information, shuffled = shuffled_information(values, labels, permutations=permutations, seed=seed)
    table = value_table(values, labels, classes, kinds)
    return Association(
        concept,
        tuple(words),
        values,
        table,
        information,
        float(shuffled.mean()),
        (1 + int((shuffled >= information - 1e-12).sum())) / (1 + permutations),
        class_name_ratio(directions, class_features),
        random_excess(features, labels, kinds, seed),
        one_class(
            table,
            nearest_values(class_features, directions),
            random_gap(features, labels, classes, used_values(values), seed),
        ),
    )


def random_values(features: Tensor, kinds: int, seed: int) -> Tensor:
    """Which of `kinds` random directions each image [n, E] has most of, int64 [n].

    Directions are drawn with the covariance of the features: images of different classes differ in almost
    any of them, so a concept must be associated with the labels more closely than that. The order of the
    images does not matter.
    """
    centered = features.float() - features.float().mean(dim=0)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(kinds, len(features), generator=generator)
    rows = F.normalize(draws @ centered[feature_order(features)], dim=-1)  # [K, E]
    scores = centered @ rows.T  # [n, K]
    return (scores / scores.std(dim=0).clamp(min=1e-12)).argmax(dim=1)


def random_excess(features: Tensor, labels: Tensor, kinds: int, seed: int = 1) -> float:
    """Mean information of random directions about the labels above that of shuffled labels."""
    excesses = [
        _excess(
            random_values(features, kinds, seed * RANDOM_DRAWS + draw), labels, None, seed, permutations=20
        )
        for draw in range(RANDOM_DRAWS)
    ]
    return sum(excesses) / len(excesses)


def random_gap(features: Tensor, labels: Tensor, classes: int, kinds: int, seed: int = 1) -> float:
    """Largest gap (see `one_class`) that one of several draws of `kinds` random directions reaches."""
    return max(
        float(class_gaps(value_table(random_values(features, kinds, seed), labels, classes, kinds)).max())
        for seed in range(seed * GAP_DRAWS, (seed + 1) * GAP_DRAWS)
    )


def used_values(values: Tensor) -> int:
    """How many values [n] are in use, at least 2: the exponential of their entropy, rounded.

    Of 26 letters that images may resemble, most are nearest to no image at all; the fewer are left, the more
    images share one.

    >>> used_values(torch.tensor([3, 3, 3, 7, 7, 7, 9, 9, 9]))
    3
    """
    share = values.bincount().double() / len(values)
    return max(2, round(float(torch.special.entr(share).sum().exp())))


def value_table(values: Tensor, labels: Tensor, classes: int, kinds: int) -> Tensor:
    """Images per class and value, int64 [C, K]."""
    return torch.bincount(labels * kinds + values, minlength=classes * kinds).view(classes, kinds)


def class_gaps(table: Tensor) -> Tensor:
    """Share of each class's images with each value, minus that of all other images: [C, K]."""
    counts = table.double()
    share = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    rest = counts.sum(dim=0) - counts
    return share - rest / rest.sum(dim=1, keepdim=True).clamp(min=1)


def one_class(table: Tensor, named: Tensor, random: float = 0.0) -> tuple[int, int, float] | None:
    """The class and value with the largest gap in a table [C, K]; `named` [C] are values of the class names.

    None if the gap is below `MIN_CLASS_GAP` or if random directions reach it, too (`random`): on features in
    which images of a class are close to each other, nearly all of them share the value of any concept.

    >>> one_class(torch.tensor([[9, 1], [0, 10], [0, 10]]), torch.tensor([1, 1, 1]))
    (0, 0, 0.9)
    >>> one_class(torch.tensor([[9, 1], [0, 10], [0, 10]]), torch.tensor([1, 1, 1]), random=0.95) is None
    True
    >>> one_class(torch.tensor([[9, 1], [0, 10], [0, 10]]), torch.tensor([0, 1, 1])) is None
    True
    """
    gap = class_gaps(table)
    gap[torch.arange(len(gap)), named] = -1.0
    label, value = divmod(int(gap.argmax()), gap.shape[1])
    score = round(float(gap[label, value]), 6)
    enough = score >= MIN_CLASS_GAP and score > random
    return (label, value, score) if enough and len(table) > 2 else None


def nearest_values(features: Tensor, directions: Tensor) -> Tensor:
    """Row of `directions` [K, E] that each image [n, E] is nearest to: int64 [n]."""
    return (F.normalize(features.float(), dim=-1) @ F.normalize(directions.float(), dim=-1).T).argmax(dim=1)


def shuffled_information(
    values: Tensor,
    labels: Tensor,
    given: Tensor | None = None,
    permutations: int = PERMUTATIONS,
    seed: int = 1,
) -> tuple[float, Tensor]:
    """Mutual information of values [n] and labels [n], and the same for shuffled labels [P].

    As shares of the labels' entropy. With `given` [n], the conditional mutual information: labels are then
    shuffled among images with the same `given`. The order of the images does not matter.
    """
    values, labels = (part.unique(return_inverse=True)[1] for part in (values, labels))
    within = torch.zeros_like(labels) if given is None else given.unique(return_inverse=True)[1]
    sort = ((within * (int(values.max()) + 1) + values) * (int(labels.max()) + 1) + labels).argsort()
    values, labels, within = values[sort], labels[sort], within[sort]
    both = (values * (int(within.max()) + 1) + within).unique(return_inverse=True)[1]
    kinds, groups, classes = (int(part.max()) + 1 for part in (both, within, labels))

    def conditional(rows: Tensor) -> Tensor:
        joint = mutual_information(both, rows, kinds, classes)
        return joint - mutual_information(within, rows, groups, classes)

    generator, order = torch.Generator().manual_seed(seed), within.argsort(stable=True)
    shuffled, at_once = [], max(1, 2_000_000 // max(len(labels), kinds * classes))
    for start in range(0, permutations, at_once):
        shape = (min(at_once, permutations - start), len(labels))
        keys = torch.rand(shape, generator=generator, dtype=torch.float64)
        rows = torch.empty(keys.shape, dtype=torch.int64)
        rows[:, order] = labels[(keys + within).argsort(dim=1)]  # keys are below 1: groups stay together
        shuffled.append(conditional(rows))
    share = torch.bincount(labels).double() / len(labels)
    entropy = max(float(-(share * share.clamp(min=1e-300).log()).sum()), 1e-12)
    return float(conditional(labels[None])) / entropy, torch.cat(shuffled) / entropy


def class_name_ratio(directions: Tensor, class_features: Tensor) -> float:
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
    """Mean of the true class's score minus the best other score.

    >>> margin(torch.tensor([[3.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    0.5
    """
    true = scores.gather(1, labels[:, None])
    other = scores.scatter(1, labels[:, None], -math.inf).amax(dim=1, keepdim=True)
    return float((true - other).double().mean())


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
            return f"{name} is not counted as associated with the labels: {figures}."
        return (
            f"{name} is not counted as associated with the labels: normalized mutual information "
            f"{association.information:.2f}, shuffled labels reach {association.expected:.2f} "
            f"(p = {association.p_value:.3f}; at most {limit:.3f} is required, because several concepts are "
            "tested)."
        )
    if verdict == CLASS_DEFINING:
        return (
            f"{name} is associated with the labels, and the class names differ in it as well "
            f"({association.class_name_ratio:.1f} times as much as in random directions), so it is probably "
            f"what defines the classes: {figures}."
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
            added = _excess(one.association.values, labels, other.association.values, seed)
            if added >= MIN_ADDED_INFO:
                continue
            remaining = _remaining_association(
                one.association, directions[one.name], directions[other.name], features, labels, seed
            )
            if remaining < MIN_REMAINING_ASSOCIATION:
                changed[one.name] = _explained(one, other.name, added, remaining)
                break
        else:
            strong.append(one)
    return tuple(changed.get(one.name, one) for one in findings)


def _excess(
    values: Tensor, labels: Tensor, given: Tensor | None, seed: int, permutations: int = 200
) -> float:
    """Information of values about labels, given another concept's values, above that of shuffled labels."""
    information, shuffled = shuffled_information(values, labels, given, permutations, seed)
    return information - float(shuffled.mean())


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
    return _excess(nearest_values(rest, directions), labels, None, seed) / max(association.excess, 1e-9)


def _explained(one: ConceptFinding, name: str, added: float, remaining: float) -> ConceptFinding:
    sentence = (
        f"{one.name} is associated with the labels only as far as {name} is: among images with the same "
        f"{name} it adds {max(added, 0.0):.2f} to the normalized information, and without the directions of "
        f"{name} {max(remaining, 0.0):.0%} of its association remains. Remove {name} first."
    )
    return replace(one, verdict=EXPLAINED, sentence=sentence, explained_by=name)
