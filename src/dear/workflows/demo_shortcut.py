"""The demo's part about shortcuts: animals shown at one place each; the shortcut is found and removed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dear._io.text import fill_template
from dear.clip.model import Clip
from dear.data import few_shot, open_data
from dear.data.images import ImageSet, group_names
from dear.heads.ablate import Collected, collect
from dear.heads.audit import ASSOCIATED, SHORTCUT, UNUSED, Finding, associate, judge, reliance
from dear.heads.repair import Repair, remove_heads, remove_span
from dear.heads.roles import RoleMap
from dear.heads.values import known_concepts, readable_words, value_features
from dear.report.demo_facts import ConceptRow, RemovalRow, ShortcutFacts
from dear.report.page import Thumbnail, thumbnail
from dear.workflows.without import ways_to_remove

DATA, CONCEPT = "world:shortcut-place", "Location"
SHOTS, SEED, DRAWS, SHOWN = 16, 1, 5, 6

Answers = Callable[[Tensor], Tensor]  #: features [n, E] -> scores [n, C]


@dataclass(frozen=True, eq=False)
class Seen:
    """The training and test images of the task, with the contributions of the heads."""

    train: ImageSet
    test: ImageSet
    train_heads: Collected
    test_heads: Collected


def shortcut_facts(clip: Clip, roles: RoleMap, per_group: int) -> ShortcutFacts:
    """Train a linear probe on animals at a place of their own each; audit, repair and test it everywhere.

    Args:
        clip: the backbone.
        roles: its role map.
        per_group: test images per class and place.
    """
    seen = _seen(clip, roles, per_group)
    untouched = probe(seen.train_heads.features, seen.train.labels)
    findings = _audit(clip, roles, seen, untouched)
    heads = roles.select(concept=CONCEPT)
    by_heads = remove_heads(seen.train_heads, heads, CONCEPT)
    by_words = remove_span(seen.train_heads, value_features(clip, known_concepts()[CONCEPT])[1], CONCEPT)
    rng, keys = random.Random(SEED), [key for key, _ in roles]
    draws = [remove_heads(seen.train_heads, rng.sample(keys, len(heads)), "random") for _ in range(DRAWS)]
    before, after = (_answers(seen, repair) for repair in (None, by_heads))
    rows = (
        _row(seen, "nothing removed", [before]),
        _row(seen, f"the {len(heads)} {CONCEPT} heads removed", [after], recommended=True),
        _row(seen, f"{len(heads)} random heads removed ({DRAWS} draws)", [_answers(seen, d) for d in draws]),
        _row(seen, f"the words of {CONCEPT} removed", [_answers(seen, by_words)]),
    )
    fixed = ((before != seen.test.labels) & (after == seen.test.labels)).nonzero()[:, 0].tolist()
    planted = next(one for one in findings if one.association.concept == CONCEPT)
    return ShortcutFacts(
        images=(len(seen.train), len(seen.test)),
        groups=len(set(group_names(seen.test) or ())),
        concepts=tuple(_concept_row(one) for one in findings),
        sentence=planted.sentence,
        heads=len(heads),
        rows=rows,
        examples=tuple(_example(seen.train, label) for label in range(len(seen.train.classes))),
        fixed=tuple(_fixed(seen.test, row, before) for row in fixed[:: max(1, len(fixed) // SHOWN)][:SHOWN]),
    )


def probe(features: Tensor, labels: Tensor) -> Answers:
    """A linear probe: logistic regression on unit features."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=100, max_iter=300).fit(F.normalize(features, dim=-1).numpy(), labels.numpy())
    weight, bias = torch.from_numpy(model.coef_).float(), torch.from_numpy(model.intercept_).float()
    return lambda rows: F.normalize(rows, dim=-1) @ weight.T + bias


def _seen(clip: Clip, roles: RoleMap, per_group: int) -> Seen:
    train, test = few_shot(open_data(DATA, "train"), SHOTS, SEED), open_data(DATA, "test")
    places: dict[str, list[int]] = {}
    for index, name in enumerate(group_names(test) or ()):
        places.setdefault(name, []).append(index)
    test = test.subset([index for rows in places.values() for index in rows[:per_group]])
    return Seen(train, test, collect(clip, train, roles.layers), collect(clip, test, roles.layers))


def _audit(clip: Clip, roles: RoleMap, seen: Seen, scores: Answers) -> list[Finding]:
    """The verdict on every concept whose words the backbone reads, suspects first."""
    images, labels = seen.train_heads, seen.train.labels
    prompts = [fill_template(seen.train.template, name) for name in seen.train.classes]
    texts = clip.encode_text(prompts).float().cpu()
    concepts = [one for one in known_concepts().values() if len(readable_words(clip, one.words)) > 1]
    own, findings = scores(images.features), []
    for concept in concepts:
        words, directions = value_features(clip, concept)
        found = associate(concept.name, words, directions, images.features, labels, texts, seed=SEED)
        ways = ways_to_remove(clip, concept, images, roles)
        heads = roles.select(concept=concept.name)
        used = [reliance(own, scores(repair.apply(images)), labels, way) for way, repair in ways.items()]
        findings.append(judge(found, max(used, key=lambda r: max(r.lost, r.changed)), heads, len(concepts)))
    rank = (SHORTCUT, ASSOCIATED, UNUSED)
    return sorted(
        findings,
        key=lambda one: (
            rank.index(one.verdict) if one.verdict in rank else len(rank),
            -one.association.excess,
        ),
    )


def _answers(seen: Seen, repair: Repair | None) -> Tensor:
    """Answers [n] of a probe trained and tested with something removed."""
    parts = (seen.train_heads, seen.test_heads)
    learn, test = (part.features if repair is None else repair.apply(part) for part in parts)
    return probe(learn, seen.train.labels)(test).argmax(dim=1)


def _row(seen: Seen, title: str, draws: Sequence[Tensor], recommended: bool = False) -> RemovalRow:
    """Accuracies, means over the draws."""
    home = _homes(seen)
    worst, everywhere, at_home = [], [], []
    for answers in draws:
        right = (answers == seen.test.labels).double()
        groups: dict[str, list[float]] = {}
        for name, hit in zip(group_names(seen.test) or (), right.tolist(), strict=True):
            groups.setdefault(name, []).append(hit)
        worst.append(min(sum(hits) / len(hits) for hits in groups.values()))
        everywhere.append(float(right.mean()))
        at_home.append(float(right[home].mean()))
    number = len(draws)
    spread = (min(worst), max(worst)) if number > 1 else None
    return RemovalRow(
        title, sum(worst) / number, sum(everywhere) / number, sum(at_home) / number, spread, recommended
    )


def _homes(seen: Seen) -> Tensor:
    """A mask [n]: the test images that show a class at its place of training."""
    trained = set(group_names(seen.train) or ())
    return torch.tensor([name in trained for name in group_names(seen.test) or ()])


def _concept_row(one: Finding) -> ConceptRow:
    found = one.association
    return ConceptRow(found.concept, found.information, found.expected, one.verdict)


def _example(images: ImageSet, label: int) -> Thumbnail:
    """The first training image of a class."""
    row = int((images.labels == label).nonzero()[0])
    name = (group_names(images) or ())[row]
    return Thumbnail(thumbnail(images.image(row)), name, (("name", name),))


def _fixed(images: ImageSet, row: int, before: Tensor) -> Thumbnail:
    """A test image that the untouched classifier takes for another class."""
    name = (group_names(images) or ())[row]
    truth, wrong = images.classes[int(images.labels[row])], images.classes[int(before[row])]
    lines = (("name", name), ("right", f"✓ {truth}"), ("soft", f"before: {wrong}"))
    return Thumbnail(thumbnail(images.image(row)), f"{name}, first answered as {wrong}", lines)
