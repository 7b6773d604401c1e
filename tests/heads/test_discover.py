"""Discovery from end to end on a small random backbone."""

import sys

import pytest
import torch
from heads_oracles import literal_textspan, tiny_clip

from dear.errors import DearError, RoleError
from dear.heads.contributions import decompose
from dear.heads.corpus import Corpus, Phrase, load_corpus
from dear.heads.discover import RoleOptions, default_corpus, default_phrases, discover_roles, text_features
from dear.heads.roles import RoleMap

WORDS = Corpus("some", load_corpus().phrases[::20])


@pytest.fixture(scope="module")
def discovered():
    clip = tiny_clip(seed=4)
    pixels = torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(6))
    stages = []
    roles = discover_roles(
        clip,
        pixels,
        layers=[3, 4],
        corpus=WORDS,
        phrases=6,
        concepts="tags",
        progress=lambda *a: stages.append(a),
    )
    return clip, pixels, roles, stages


def test_phrases_are_those_of_the_literal_procedure(discovered):
    clip, pixels, roles, _ = discovered
    parts = decompose(clip, pixels, [3, 4])
    text = clip.encode_text(list(WORDS.texts)).numpy()
    for (layer, head), role in roles:
        expected = literal_textspan(parts.heads[:, layer - 3, head].numpy(), text, 6)
        assert role.phrases == tuple(WORDS.texts[pick] for pick in expected)


def test_the_map_is_bound_whole_and_saved(discovered, tmp_path):
    clip, _, roles, _ = discovered
    assert roles.layers == (3, 4)
    assert roles.fingerprint == clip.fingerprint
    assert roles.check(clip) is None
    with pytest.raises(RoleError):
        roles.check(tiny_clip(seed=5))
    assert roles.evidence["image_count"] == 40
    assert roles.evidence["corpus"]["phrases"] == len(WORDS)
    assert roles.parameters == {"tau": 0.35}
    roles.save(tmp_path / "roles.json")
    assert RoleMap.load(tmp_path / "roles.json") == roles
    for _, role in roles:
        assert sum(role.shares.values()) == pytest.approx(1, abs=1e-5)
        assert [WORDS.tags[p] for p in role.phrases].count(next(iter(role.shares))) == max(
            round(share * 6) for share in role.shares.values()
        )


def test_progress_tells_every_stage(discovered):
    stages = [stage for stage, _, _ in discovered[3]]
    assert list(dict.fromkeys(stages)) == ["phrases", "images", "heads", "concepts", "stability"]
    assert ("images", 40, 40) in discovered[3]


def test_the_ways_to_find_concepts(discovered):
    clip, pixels, _, _ = discovered
    options = {"layers": [4], "corpus": WORDS, "phrases": 12}
    clusters = discover_roles(clip, pixels, rule="quantile", **options)
    assert clusters.evidence["concepts"]["way"] == "clusters"
    assert 0 < clusters.evidence["concepts"]["agreement"]["same_name"] <= 1
    assert clusters.parameters == {"q": 0.2}
    with_own_sentences = discover_roles(
        clip, pixels, concepts={"Here": ["a city"], "There": ["a cat", "a dog"]}, core=("Here",), **options
    )
    assert {c for _, role in with_own_sentences for c in role.shares} <= {"Here", "There"}
    assert {role.kind for _, role in with_own_sentences} <= {"core", "other", "mixed"}


def test_wrong_options_are_told_before_the_work(discovered):
    clip = discovered[0]

    def never():
        raise AssertionError("images were read")
        yield

    bare = Corpus("bare", tuple(Phrase(text) for text in WORDS.texts))
    for options in (
        {"rule": "best"},
        {"rule": "quantile", "value": 0.9},
        {"phrases": 0},
        {"batch_size": 0},
        {"concepts": {}},
        {"concepts": {"Color": []}},
        {"concepts": "tags", "corpus": bare},
        {"colour": 1},
        {"sentences": "no/such-model"},
    ):
        with pytest.raises(DearError):
            discover_roles(clip, never(), **{"corpus": WORDS, **options})
    with pytest.raises(RoleError, match=r"\b1\b"):
        discover_roles(clip, torch.zeros(1, 3, 32, 32), corpus=WORDS)
    with pytest.raises(RoleError):
        discover_roles(clip, torch.zeros(4, 3, 32, 32), corpus=WORDS)
    with pytest.raises(RoleError, match="'empty'"):
        discover_roles(tiny_clip(), torch.randn(4, 3, 32, 32), corpus=Corpus("empty", ()), concepts="tags")
    with pytest.raises(RoleError, match="magic"):
        discover_roles(clip, discovered[1], corpus=WORDS, concepts="magic")


def test_a_missing_extra_is_told_before_the_images_are_read(discovered, monkeypatch):
    def never():
        raise AssertionError("images were read")
        yield

    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    for concepts in ("clusters", "fixed", {"Color": ["red"]}):
        with pytest.raises(DearError, match="roles"):
            discover_roles(discovered[0], never(), corpus=WORDS, concepts=concepts)


def test_options_as_one_value_or_by_name(discovered):
    clip, pixels, _, _ = discovered
    options = RoleOptions(layers=[4], corpus=WORDS, phrases=12, concepts="tags")
    assert discover_roles(clip, pixels, options) == discover_roles(
        clip, pixels, layers=[4], corpus=WORDS, phrases=12, concepts="tags"
    )
    assert discover_roles(clip, pixels, options, rule="quantile").rule == "quantile"


def test_phrases_that_read_alike_are_kept_once():
    clip = tiny_clip()
    texts, features, dropped = text_features(clip, ["a cat", "A CAT", "a dog", "a  cat"])
    assert texts == ("a cat", "a dog")
    assert features.shape == (2, 20)
    assert dropped == 2
    torch.testing.assert_close(features.norm(dim=1), torch.ones(2))


def test_defaults_follow_the_backbone():
    assert default_corpus(tiny_clip()) == "general"
    assert default_phrases(tiny_clip()) == 2  # heads of width 8
    assert default_phrases(tiny_clip(width=192, heads=3)) == 20


def test_features_keep_the_order_of_the_phrases():
    clip = tiny_clip()
    texts = ["a very long phrase about a cat on a mat", "a dog", "two words more than a dog", "red"]
    distinct, features, _ = text_features(clip, texts)
    assert distinct == tuple(texts)
    expected = torch.nn.functional.normalize(clip.encode_text(texts), dim=-1)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


def test_user_corpus_without_tags(discovered):
    clip, pixels, _, _ = discovered
    bare = Corpus("bare", tuple(Phrase(text) for text in WORDS.texts))
    with pytest.raises(RoleError, match="'tags'"):
        discover_roles(clip, pixels, layers=[4], corpus=bare, concepts="tags")
    roles = discover_roles(clip, pixels, layers=[4], corpus=bare, phrases=12)
    assert roles.evidence["concepts"]["agreement"] == {}
