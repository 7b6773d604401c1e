"""Audit: association against plain counting, verdicts on planted shortcuts and the control, the choice."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from sklearn.metrics import mutual_info_score

import dear
from dear.clip.model import Clip
from dear.data import few_shot, open_data
from dear.errors import UsageError
from dear.heads.collect import HeadContributions, collect_contributions
from dear.heads.concept_words import find_concept, known_concepts, readable_words, value_features
from dear.heads.known_roles import known_roles
from dear.shortcuts.concept_trials import choose_concept_removal, exchange
from dear.shortcuts.removal import remove_heads, remove_span
from dear.tasks.audit import findings as verdicts_of
from dear.tasks.audit.association import (
    Association,
    associate,
    mutual_information,
    one_class,
    shuffled_information,
)
from dear.tasks.audit.reliance import reliance
from dear.tasks.audit.verdict import explain_away, judge


@pytest.fixture(scope="module")
def mini() -> Clip:
    return dear.load("mini")


_values = cache(value_features)  # several tests look at the same concepts, and at the same images


@cache
def _shots(mini: Clip, name: str, seed: int = 1) -> tuple[HeadContributions, torch.Tensor, torch.Tensor]:
    images = few_shot(open_data(name, "train"), 16, seed)
    roles = known_roles(mini)
    assert roles is not None
    texts = mini.encode_text([images.template.replace("{}", name) for name in images.classes])
    return collect_contributions(mini, images, roles.layers), images.labels, texts


def test_mutual_information_is_plain_counting() -> None:
    rng = np.random.default_rng(0)
    values, labels = rng.integers(0, 5, 60), rng.integers(0, 3, (4, 60))
    found = mutual_information(torch.from_numpy(values), torch.from_numpy(labels), 5, 3)
    for row, own in zip(labels, found.tolist(), strict=True):
        pairs = Counter(zip(values.tolist(), row.tolist(), strict=True))
        left, right = Counter(values.tolist()), Counter(row.tolist())
        plain = sum(
            count / 60 * math.log(count * 60 / (left[value] * right[label]))
            for (value, label), count in pairs.items()
        )
        assert own == pytest.approx(plain)
        assert own == pytest.approx(mutual_info_score(values, row))


def test_a_small_p_value_that_is_not_small_enough_names_its_limit() -> None:
    values = torch.zeros(4, dtype=torch.int64)
    table = torch.ones(2, 2, dtype=torch.int64)
    for p_value, required in ((0.013, True), (0.001, False)):
        found = judge(Association("Style", ("a", "b"), values, table, 0.28, 0.20, p_value, 1.0), None)
        assert found.verdict == verdicts_of.NOT_ASSOCIATED
        assert ("0.004" in found.sentence) == required


def test_the_permutation_test_is_fair() -> None:
    """With labels dealt out at random, p-values are spread evenly."""
    generator = torch.Generator().manual_seed(0)
    directions, classes = torch.eye(4), torch.eye(4)[:2]
    low = 0
    for seed in range(60):
        features = torch.randn(40, 4, generator=generator)
        labels = torch.randint(0, 2, (40,), generator=generator)
        found = associate("q", "abcd", directions, features, labels, classes, permutations=99, seed=seed)
        low += found.p_value <= 0.25
        assert found.table.sum() == 40
        assert int(found.table[1, 2]) == int(((found.values == 2) & (labels == 1)).sum())
    assert 5 <= low <= 26


def test_a_value_of_one_class_counts_only_where_random_directions_do_not_reach_it() -> None:
    """Images of a class that are close to each other share a value of any concept, clean ones too."""
    generator = torch.Generator().manual_seed(0)
    labels, basis = torch.arange(6).repeat_interleave(20), torch.eye(32)
    noise = torch.randn(120, 32, generator=generator)

    clusters = 3 * torch.randn(6, 32, generator=generator)[labels] + 0.2 * noise
    directions = torch.randn(12, 32, generator=generator)
    names = directions[-1:].expand(6, -1)
    association = associate("q", "abcdefghijkl", directions, clusters, labels, names, permutations=99)
    assert one_class(association.table, torch.full((6,), 11)) is not None
    assert association.one_class is None

    planted = noise + 6 * torch.where(labels[:, None] == 0, basis[0], basis[1])
    names = basis[1:2].expand(6, -1)
    association = associate("q", "ab", basis[:2], planted, labels, names, permutations=99)
    assert association.one_class is not None
    assert association.one_class[:2] == (0, 0)


@pytest.mark.parametrize(
    ("name", "concept"),
    [("place@0.9", "Location"), ("color@0.9", "Color"), ("texture@0.9", "Texture"), ("place", "Location")],
)
def test_planted_shortcuts_are_found_and_the_others_are_not(mini: Clip, name: str, concept: str) -> None:
    images, labels, texts = _shots(mini, f"world:shortcut-{name}")
    verdicts = {}
    for known in known_concepts().values():
        words, directions = _values(mini, known)
        found = associate(known.name, words, directions, images.features, labels, texts)
        verdicts[known.name] = judge(found, None).verdict
    assert verdicts[concept] == verdicts_of.ASSOCIATED
    assert [name for name, verdict in verdicts.items() if verdict == verdicts_of.ASSOCIATED] == [concept]
    assert verdicts["Animal"] == verdicts_of.CLASS_DEFINING


def test_the_control_is_silent(mini: Clip) -> None:
    for seed in (1, 2):
        images, labels, texts = _shots(mini, "world:shortcut-none", seed)
        for known in known_concepts().values():
            words, directions = _values(mini, known)
            found = associate(known.name, words, directions, images.features, labels, texts)
            assert judge(found, None).verdict in (verdicts_of.NOT_ASSOCIATED, verdicts_of.CLASS_DEFINING)


def test_verdicts() -> None:
    table = torch.eye(2).long()
    strong = Association("Color", ("red", "blue"), torch.tensor([0, 1]), table, 0.9, 0.1, 0.001, 0.2)
    labels = torch.tensor([0, 1])
    before, after = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.5, 0.0]])
    uses = reliance(before, after, labels)
    assert (uses.changed, uses.margin, uses.margin_without) == (0.5, 2.0, 0.25)
    assert uses.lost == pytest.approx(0.875)
    assert judge(strong, uses).verdict == verdicts_of.SHORTCUT
    assert judge(strong, reliance(before, before, labels)).verdict == verdicts_of.UNUSED
    half = judge(strong, reliance(before, before / 2, labels))  # where the concept is reversed, answers turn
    assert half.verdict == verdicts_of.SHORTCUT
    less = judge(strong, reliance(before, before * 0.8, labels))
    assert less.verdict == verdicts_of.SHIFTS
    assert not less.suspected
    assert less.sentence.endswith(
        "It shifts scores, but changes no answer: without it 0.0% of the answers change and the margin falls "
        "by 20.0%."
    )
    about = Association("Color", ("red", "blue"), torch.tensor([0, 1]), table, 0.9, 0.1, 0.001, 7.0)
    assert judge(about, uses).verdict == verdicts_of.CLASS_DEFINING
    weak = Association("Color", ("red", "blue"), torch.tensor([0, 1]), table, 0.15, 0.1, 0.001, 0.2)
    unsure = Association("Color", ("red", "blue"), torch.tensor([0, 1]), table, 0.9, 0.1, 0.02, 0.2)
    assert judge(weak, uses).verdict == judge(unsure, uses).verdict == verdicts_of.NOT_ASSOCIATED


def test_exchange_moves_the_removed_part_and_nothing_else(mini: Clip) -> None:
    images, labels, _ = _shots(mini, "world:shortcut-place")
    roles = known_roles(mini)
    assert roles is not None
    words = remove_span(images, _values(mini, find_concept("location"))[1], "Location")
    heads = remove_heads(images, roles.select(concept="Location"), "Location")
    partner = torch.arange(len(labels)).roll(20)
    for way in (words, heads):
        moved = exchange(images, way, partner)
        assert torch.allclose(way.apply(moved), way.apply(images), atol=1e-4)
        assert not torch.allclose(moved.features, images.features, atol=1e-2)


def test_the_choice_finds_the_way_that_works(mini: Clip) -> None:
    """Color: three heads are not all of it, the words are."""
    images, labels, _ = _shots(mini, "world:shortcut-color")
    roles = known_roles(mini)
    assert roles is not None
    ways = {
        "heads": remove_heads(images, roles.select(concept="Color"), "Color"),
        "words": remove_span(images, _values(mini, find_concept("color"))[1], "Color"),
    }
    choice = choose_concept_removal(images, labels, ways)
    assert choice.way == "words"
    assert choice.scores["words"] > choice.scores["heads"] + 0.03
    assert choose_concept_removal(images, labels, {"heads": ways["heads"]}).way == "heads"
    assert not choice.costly
    assert choose_concept_removal(images, labels, ways, heads_first=True).way == "words"
    weak, own, _ = _shots(mini, "world:shortcut-color@0.9", seed=2)  # heads come near there, not near enough
    ways = {
        "heads": remove_heads(weak, roles.select(concept="Color"), "Color"),
        "words": remove_span(weak, _values(mini, find_concept("color"))[1], "Color"),
    }
    assert choose_concept_removal(weak, own, ways, heads_first=True).way == "words"
    with pytest.raises(UsageError):
        choose_concept_removal(images, labels, {})


def test_a_method_inside_the_tower_takes_heads_where_they_are_enough(mini: Clip) -> None:
    images, labels, _ = _shots(mini, "world:shortcut-place")
    roles = known_roles(mini)
    assert roles is not None
    ways = {
        "words": remove_span(images, _values(mini, find_concept("location"))[1], "Location"),
        "heads": remove_heads(images, roles.select(concept="Location"), "Location"),
    }
    assert choose_concept_removal(images, labels, ways).way == "words"
    assert choose_concept_removal(images, labels, ways, heads_first=True).way == "heads"


def test_concepts_by_name_and_by_values(mini: Clip) -> None:
    assert find_concept("Colour").name == "Color"
    own = find_concept("background: beach , forest, beach, lab bench")
    assert (own.name, own.words, own.role) == ("background", ("beach", "forest", "lab bench"), "Location")
    assert readable_words(mini, own.words) == ("beach", "forest")
    words, directions = value_features(mini, own)
    assert words == ("beach", "forest")
    assert torch.allclose(directions.norm(dim=1), torch.ones(2))
    for text in ("smell", "light: day", ": a, b"):
        with pytest.raises(UsageError, match=text):
            find_concept(text)
    with pytest.raises(UsageError, match="background"):
        value_features(mini, find_concept("background: beach, kitchen, parking lot"))


def test_planted_letters_are_found_and_what_they_look_like_is_not(mini: Clip) -> None:
    """Places are what the classes are about; the object nearest to a letter goes with it, no more."""
    images, labels, texts = _shots(mini, "world:shortcut-text@0.9")
    findings, spans = [], {}
    for name in ("object", "shape", "text", "location", "color"):
        words, spans[name] = value_features(mini, find_concept(name))
        findings.append(judge(associate(name, words, spans[name], images.features, labels, texts), None))
    assert findings[0].verdict == verdicts_of.ASSOCIATED
    told = explain_away(findings, spans, images.features, labels)
    assert {one.association.concept: (one.verdict, one.explained_by) for one in told} == {
        "object": (verdicts_of.EXPLAINED, "text"),
        "shape": (verdicts_of.NOT_ASSOCIATED, ""),
        "text": (verdicts_of.ASSOCIATED, ""),
        "location": (verdicts_of.CLASS_DEFINING, ""),
        "color": (verdicts_of.NOT_ASSOCIATED, ""),
    }


def test_what_values_tell_beyond_others() -> None:
    values = torch.tensor([0, 0, 1, 1] * 20)
    given = torch.tensor([0, 1, 0, 1] * 20)
    labels = values ^ given  # neither tells anything alone, both together everything
    alone, _ = shuffled_information(values, labels, permutations=50)
    assert alone == pytest.approx(0, abs=1e-9)
    beyond, drawn = shuffled_information(values, labels, given, permutations=50)
    assert beyond == pytest.approx(1)
    assert drawn.max() < 0.3
    # Dealt out among images with the same label, labels stay as they are: nothing is left to tell.
    nothing, drawn = shuffled_information(values, labels, labels, permutations=50)
    assert nothing == pytest.approx(0, abs=1e-9)
    assert drawn.abs().max() < 1e-9


def test_a_second_shortcut_stays_suspected() -> None:
    """Two concepts have a value per class, in directions of their own; a third reads the first's."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(3).repeat(20)
    axes = torch.eye(12)
    features = 3 * axes[labels] + 2.5 * axes[3 + labels] + 0.3 * torch.randn(60, 12, generator=generator)
    spans = {"first": axes[:3], "second": axes[3:6], "third": axes[:3] + 0.4 * axes[6:9]}
    classes = axes[9:12]  # the class names differ in something else
    findings = [
        judge(associate(name, "abc", span, features, labels, classes, permutations=200), None, concepts=3)
        for name, span in spans.items()
    ]
    assert {one.verdict for one in findings} == {verdicts_of.ASSOCIATED}
    told = explain_away(findings, spans, features, labels)
    assert [one.verdict for one in told] == [
        verdicts_of.ASSOCIATED,
        verdicts_of.ASSOCIATED,
        verdicts_of.EXPLAINED,
    ]
    assert told[2].explained_by == "first"


def test_a_removal_that_takes_the_classes_away_is_told(mini: Clip) -> None:
    """On mini, letters and animals are values of one factor: without letters, animals are hard to tell."""
    images, labels, _ = _shots(mini, "world:shortcut-attack@0.9")
    words = remove_span(images, value_features(mini, find_concept("text"))[1], "Text")
    some = remove_span(images, value_features(mini, find_concept("text: a, e, h, o, s, x"))[1], "Text")
    choice = choose_concept_removal(images, labels, {"words": words, "examples": words})
    assert choice.costly
    assert choice.before is not None
    assert choice.after is not None
    assert choice.before > choice.after + 0.05
    assert some.rank == 5
