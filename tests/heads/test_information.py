"""Information of a role map: hand-made cases, rotated heads, and mini, whose heads are specialized."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

import dear
from dear.heads.corpus import load_corpus
from dear.heads.discover import default_phrases, text_features
from dear.heads.from_weights import weight_moments
from dear.heads.information import head_information, measure_information, rotated_moments
from dear.heads.textspan import textspan_moments


def literal_information(heads):
    """Mutual information from the joint distribution, by plain loops."""
    names = sorted({concept for head in heads for concept in head})
    joint = {(h, n): head.count(n) / len(head) / len(heads) for h, head in enumerate(heads) for n in names}
    total = 0.0
    for h, name in product(range(len(heads)), names):
        p, column = joint[h, name], sum(joint[other, name] for other in range(len(heads)))
        if p > 0:
            total += p * math.log2(p / (column / len(heads)))
    return total


@pytest.mark.parametrize("seed", range(3))
def test_information_is_mutual_information(seed):
    draw = torch.Generator().manual_seed(seed)
    heads = [
        ["ABCD"[int(i)] for i in torch.randint(0, 4, (size,), generator=draw)] for size in (5, 5, 3, 8, 1)
    ]
    assert head_information(heads) == pytest.approx(literal_information(heads), abs=1e-12)


def test_information_of_clear_cases():
    assert head_information([["A"] * 4] * 6) == pytest.approx(0.0, abs=1e-12)  # all heads say the same
    assert head_information([["A"] * 3, ["B"] * 9, ["C"] * 2, ["D"]]) == pytest.approx(2.0)
    assert head_information([["A"], [], ["B"]]) == pytest.approx(1.0)  # a head without phrases
    assert head_information([]) == 0.0


def test_a_rotation_keeps_what_heads_are_but_not_where_they_point(clip):
    moments = weight_moments(clip)
    rotated = rotated_moments(moments, seed=1)
    assert rotated.count == moments.count
    before, after = (m.maps.double().mT @ m.square @ m.maps.double() for m in (moments, rotated))
    torch.testing.assert_close(*map(torch.linalg.eigvalsh, (after, before)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(after, before, rtol=0.1)
    again, other = rotated_moments(moments, seed=1), rotated_moments(moments, seed=2)
    assert torch.equal(again.maps, rotated.maps)
    assert not torch.equal(other.maps, rotated.maps)


def test_heads_of_mini_say_more_than_rotated_ones():
    clip, corpus = dear.load("mini"), load_corpus("world")
    texts, features, _ = text_features(clip, corpus.texts)
    moments = weight_moments(clip, range(9, 13))

    def find(some):
        picks = textspan_moments(some, features, default_phrases(clip)).picks.flatten(0, 1).tolist()
        return [[corpus.tags[texts[pick]] for pick in head] for head in picks]

    assert measure_information(find(moments), moments, find, rotations=4).exceeds_chance
    other = rotated_moments(moments, seed=99)
    assert not measure_information(find(other), other, find, rotations=4).exceeds_chance
