"""Focus: the contribution of the heads of one role as a second feature (method page, section 2d).

For a role r with heads H_r, `c_r(x)` is the sum of their contributions to the image feature z(x). The focused
feature is `[unit(z - mean z), w unit(c_r - mean c_r)]`, means over the training images. Which role, and which
weight w, is chosen on the training images.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.model import Clip
from dear.data.folds import IntArray, feature_folds
from dear.errors import UsageError
from dear.heads.concept_words import known_concepts, value_features, word_features
from dear.heads.names import Head
from dear.heads.roles import RoleMap

AUTO, NONE = "auto", "none"
WEIGHTS = (1.0, 2.0)  #: of the heads relative to the whole feature, to choose from
_FOLDS, _REPEATS = 4, 2
_RIDGE = 0.1
_MARGIN = 0.5  # standard errors by which a focus must be better than none
_MOST_IMAGES = 1500  # for cross-validation: it solves systems of that size
_NAME_SHARE = 2 / 3  # share of class names that must be nearest to a word of one concept


def attribute_heads(roles: RoleMap) -> dict[str, tuple[Head, ...]]:
    """The attributes that have heads, core concepts first; none where the map is close to chance."""
    if roles.is_informative() is False:
        return {}
    names = (*roles.core, *sorted({role.concept for _, role in roles if role.concept} - set(roles.core)))
    by_name = {name: roles.select(concept=name) for name in names}
    return {name: heads for name, heads in by_name.items() if heads}


def centered_unit(rows: Tensor, center: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows [n, W] less their center at unit length, and the center: their mean by default."""
    center = rows.mean(dim=0) if center is None else center
    return F.normalize(rows - center, dim=-1), center


def focused_feature(features: Tensor, terms: Tensor, mean: Tensor, weight: float) -> Tensor:
    """The focused feature at unit length, [..., 2 E].

    Args:
        features: z [..., E].
        terms: c_r [..., E].
        mean: of z and of c_r over the training images, one after the other [2 E].
        weight: of c_r relative to z.
    """
    z_mean, c_mean = mean.chunk(2)
    parts = [F.normalize(features - z_mean, dim=-1), weight * F.normalize(terms - c_mean, dim=-1)]
    return torch.cat(parts, dim=-1) / math.sqrt(1 + weight**2)


@dataclass(frozen=True)
class FocusChoice:
    """What learning is focused on, and why."""

    role: str | None  #: None: on nothing; the whole feature is used
    heads: tuple[Head, ...] = ()
    weight: float = 1.0  #: of the heads relative to the whole feature
    why: str = ""  #: one sentence for people
    #: cross-validated accuracy on the training images by role, and with none; empty where it was not measured
    scores: Mapping[str, float] = field(default_factory=dict)


def choose_focus(
    features: Tensor,
    parts: Mapping[str, Tensor],
    labels: Tensor,
    heads: Mapping[str, tuple[Head, ...]],
    units: IntArray | None = None,
) -> FocusChoice:
    """The role, or none, that serves the training images best in cross-validation.

    Candidates are compared by the squared error of a ridge regression on held-out images, which says more
    about few images than their accuracy; a role must win by half a standard error. `parts` are what the heads
    of each role add to the image features [n, E]. `units` [n]: copies of an image have the same; None: images
    with equal features are copies.
    """
    trials = _cross_validate(features, parts, labels, units)
    none = trials[NONE, 0.0]
    better = {
        key: float(gain.mean())
        for key, trial in trials.items()
        if key[0] != NONE and _exceeds_margin(gain := none.error - trial.error)
    }
    best = max(better, key=lambda key: better[key], default=(NONE, 0.0))
    accuracy = {role: max(t.accuracy for (r, _), t in trials.items() if r == role) for role in (NONE, *parts)}
    if best[0] == NONE:
        tried = max(parts, key=lambda role: accuracy[role], default=None)
        nearest = "" if tried is None else f", at best {accuracy[tried]:.1%} with {tried}"
        reason = f"no role is clearly better than none ({none.accuracy:.1%} in cross-validation{nearest})"
        return FocusChoice(None, why=reason, scores=accuracy)
    reason = _accuracy_sentence(best[0], trials[best].accuracy, none.accuracy)
    return FocusChoice(best[0], heads[best[0]], best[1], reason, accuracy)


def choose_focus_weight(
    features: Tensor,
    part: Tensor,
    labels: Tensor,
    role: str,
    heads: tuple[Head, ...],
    units: IntArray | None = None,
) -> FocusChoice:
    """The role that the user named, with its weight by cross-validation and its effect on accuracy."""
    trials = _cross_validate(features, {role: part}, labels, units)
    none = trials.pop((NONE, 0.0))
    best = min(trials, key=lambda key: float(trials[key].error.mean()))
    accuracy, gain = trials[best].accuracy, none.error - trials[best].error
    reason = _accuracy_sentence(role, accuracy, none.accuracy)
    if not _exceeds_margin(gain):
        reason += "; this focus gains nothing here"
    return FocusChoice(role, heads, best[1], reason, {NONE: none.accuracy, role: accuracy})


@torch.no_grad()
def focus_by_names(clip: Clip, classes: Sequence[str], heads: Mapping[str, tuple[Head, ...]]) -> FocusChoice:
    """The role that the class names are about, for training sets too small to cross-validate.

    A concept is chosen if two thirds of the names are nearer to one of its words than to any word of another
    concept, in the backbone's text space.
    """
    owners: list[str] = []
    words: list[Tensor] = []
    for concept in known_concepts().values():
        try:
            _, features = value_features(clip, concept)
        except UsageError:  # a text tower with a reduced vocabulary reads too few of its words
            continue
        words.append(features)
        owners += [concept.name] * len(features)
    nearest = (word_features(clip, classes) @ torch.cat(words).T).argmax(dim=1)
    name, votes = Counter(owners[index] for index in nearest.tolist()).most_common(1)[0]
    share = votes / len(classes)
    evidence = f"{share:.0%} of the class names are nearest to words for {name}"
    if share < _NAME_SHARE:
        return FocusChoice(None, why=f"the class names match no concept clearly: {evidence}")
    if name not in heads:
        return FocusChoice(None, why=f"{evidence}, which no head of the role map has")
    return FocusChoice(name, heads[name], 1.0, f"{evidence}; one image per class is too few to measure it")


def _accuracy_sentence(role: str, accuracy: float, none: float) -> str:
    return (
        f"cross-validated accuracy on the training images is {accuracy:.1%} with the heads of {role}, "
        f"{none:.1%} without"
    )


def few_specialized_note(roles: RoleMap) -> str | None:
    """A clause for notices if fewer than half of the heads have an attribute role; else None."""
    total = len(list(roles))
    specialized = sum(len(heads) for heads in attribute_heads(roles).values())
    if 2 * specialized >= total:
        return None
    return f"{total - specialized} of {total} heads have no attribute role"


def enough_to_measure(labels: Tensor, units: IntArray | None = None) -> bool:
    """Whether cross-validation is possible: two images or more in most classes, copies counted once."""
    pairs = torch.stack([labels, torch.arange(len(labels)) if units is None else torch.from_numpy(units)])
    return int(torch.bincount(pairs.unique(dim=1)[0]).float().median()) >= 2


@dataclass(frozen=True)
class _Trial:
    """Squared error of each image that was held out [m], and accuracy."""

    error: Tensor
    accuracy: float


def _exceeds_margin(gain: Tensor) -> bool:
    """Whether a gain [n] is more than half a standard error."""
    return float(gain.mean()) > _MARGIN * float(gain.std()) / math.sqrt(len(gain))


def _cross_validate(
    features: Tensor, parts: Mapping[str, Tensor], labels: Tensor, units: IntArray | None
) -> dict[tuple[str, float], _Trial]:
    """Trials of the image feature alone, and of each role with each weight."""
    rows = _sample_rows(labels)
    labels, units = labels[rows], None if units is None else units[rows.numpy()]
    folds = [feature_folds(features[rows], labels, _FOLDS, units, seed) for seed in range(_REPEATS)]

    def gram(values: Tensor) -> Tensor:
        unit = centered_unit(values[rows].double())[0]
        return unit @ unit.T

    feature_products = gram(features)
    trials = {(NONE, 0.0): _ridge(feature_products, labels, folds)}
    for role, part in parts.items():
        products = gram(part)  # [n, n]
        for weight in WEIGHTS:
            trials[role, weight] = _ridge(feature_products + weight**2 * products, labels, folds)
    return trials


def _ridge(gram: Tensor, labels: Tensor, folds: Sequence[Tensor]) -> _Trial:
    """Ridge regression on one-hot labels with products [n, n] of the features; a bias has the product 1."""
    gram = gram + 1
    truth = F.one_hot(labels).to(gram)
    predictions = torch.zeros_like(truth)  # [n, C]
    for fold in folds:
        for number in range(_FOLDS):
            held_out, training = fold == number, fold != number
            if not bool(held_out.any()):
                continue
            inner = gram[training][:, training]
            solved = torch.linalg.solve(inner + _RIDGE * torch.eye(len(inner)).to(inner), truth[training])
            predictions[held_out] += gram[held_out][:, training] @ solved / len(folds)
    answered = folds[0] >= 0
    accuracy = float((predictions.argmax(dim=1) == labels)[answered].double().mean())
    return _Trial((predictions - truth)[answered].square().sum(dim=1), accuracy)


def _sample_rows(labels: Tensor) -> Tensor:
    """All images, or as many as fit, evenly from every class."""
    if len(labels) <= _MOST_IMAGES:
        return torch.arange(len(labels))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    rank = torch.zeros_like(labels)
    for label in labels.unique():
        members = order[labels[order] == label]
        rank[members] = torch.arange(len(members))
    return rank.argsort(stable=True)[:_MOST_IMAGES].sort().values
