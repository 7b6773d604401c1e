"""The association of a concept's values with the labels of images, and what chance would give.

Method page, section 4. The value of a concept in an image is the one whose words the frozen model finds
nearest; no group labels are needed. The association is compared with that of shuffled labels and with that
of random directions of the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.data.folds import feature_order
from dear.errors import UsageError
from dear.shortcuts.removal import span_basis

PERMUTATIONS = 1000
MIN_ASSOCIATION = 0.10  #: normalized mutual information above that of shuffled labels
MIN_ABOVE_RANDOM = 0.05  #: the same above that of random directions of the features
RANDOM_DRAWS = 32
GAP_DRAWS = 50  #: of random directions, none of which may reach the gap of a class
MIN_CLASS_GAP = 0.90  #: share of a class's images with a value, minus that of all other images


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
            f"normalized mutual information {self.information:.2f}, at least {self.required:.2f} required; "
            f"as many random directions reach {reached:.2f}, shuffled labels {self.expected:.2f}"
        )


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
        information_excess(
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
    condition: Tensor | None = None,
    permutations: int = PERMUTATIONS,
    seed: int = 1,
) -> tuple[float, Tensor]:
    """Mutual information of values [n] and labels [n], and the same for shuffled labels [P].

    As shares of the labels' entropy. With `condition` [n], the conditional mutual information: labels are
    then shuffled among images with the same value of it. The order of the images does not matter.
    """
    values, labels = (part.unique(return_inverse=True)[1] for part in (values, labels))
    within = torch.zeros_like(labels) if condition is None else condition.unique(return_inverse=True)[1]
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


def information_excess(
    values: Tensor, labels: Tensor, condition: Tensor | None, seed: int, permutations: int = 200
) -> float:
    """Information of values about labels, given another concept's values, above that of shuffled labels."""
    information, shuffled = shuffled_information(values, labels, condition, permutations, seed)
    return information - float(shuffled.mean())
