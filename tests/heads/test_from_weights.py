"""Heads described by weights alone: plain loops, properties, and the known factors of mini."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from heads_oracles import tiny_clip
from other_families import FAMILIES, model

import dear
from dear.clip.factory import EMBEDDED
from dear.errors import RoleError, UsageError
from dear.heads.contributions import head_maps
from dear.heads.corpus import load_corpus
from dear.heads.discover import default_phrases, discover_roles, text_features
from dear.heads.from_weights import direction_outputs, draw_phrases, phrase_stability, weight_moments
from dear.heads.role import Role
from dear.heads.roles import RoleMap
from dear.heads.stability import role_map_warnings
from dear.heads.textspan import textspan, textspan_moments


def literal_contribution(clip, layer, head, direction):
    """What a head adds to the feature for one direction of its normed input, by plain loops; no biases."""
    visual, block = clip.visual, clip.visual.blocks[layer - 1]
    width, size = clip.config.vision.width, clip.config.vision.head_width
    row = [(1.0 if i == direction else 0.0) - 1 / width for i in range(width)]
    row = [r * float(w) for r, w in zip(row, block.ln_1.weight, strict=True)]
    value = [
        sum(float(block.attn.v.weight[head * size + k, i]) * row[i] for i in range(width))
        for k in range(size)
    ]
    written = [
        sum(float(block.attn.o.weight[j, head * size + k]) * value[k] for k in range(size))
        for j in range(width)
    ]
    mean = sum(written) / width
    normed = [(x - mean) * float(w) for x, w in zip(written, visual.ln_post.weight, strict=True)]
    return torch.tensor(normed) @ visual.proj.float()


def test_outputs_are_those_of_plain_loops(clip):
    layers = [1, clip.config.vision.layers]
    contributions = torch.einsum("nlhd,lhde->nlhe", direction_outputs(clip, layers), head_maps(clip, layers))
    for place, layer in enumerate(layers):
        for head, direction in ((0, 0), (1, 3), (clip.config.vision.heads - 1, clip.config.vision.width - 1)):
            expected = literal_contribution(clip, layer, head, direction)
            torch.testing.assert_close(contributions[direction, place, head], expected, rtol=1e-4, atol=1e-6)


def test_values_of_any_row_are_sums_of_the_outputs(clip):
    """Through the real LayerNorm and the real value matrix: a row is a sum of directions."""
    heads, rows = clip.config.vision.heads, torch.randn(5, clip.config.vision.width)
    for layer in (1, 2):
        block = clip.visual.blocks[layer - 1]
        with torch.no_grad():
            values = torch.nn.functional.linear(block.ln_1(rows) - block.ln_1.bias, block.attn.v.weight)
        unweighted = torch.nn.functional.layer_norm(rows, rows.shape[-1:], eps=block.ln_1.eps)
        sums = torch.einsum("bi,ihd->bhd", unweighted, direction_outputs(clip, [layer])[:, 0])
        torch.testing.assert_close(sums, values.unflatten(1, (heads, -1)), rtol=1e-4, atol=1e-5)


def test_moments_are_those_of_the_value_output_matrix(clip):
    moments = weight_moments(clip)
    assert moments.count == clip.config.vision.width
    assert moments.total.abs().max() < 1e-4  # directions less their mean
    value_output = torch.einsum("nlhd,lhde->lhne", direction_outputs(clip).double(), moments.maps.double())
    square = moments.maps.double().mT @ moments.square @ moments.maps.double()
    singular = torch.linalg.svdvals(value_output)
    eigen = torch.linalg.eigvalsh(square).flip(-1).clamp(min=0).sqrt()
    torch.testing.assert_close(eigen[..., : singular.shape[-1]], singular, rtol=1e-4, atol=1e-4)


def test_a_scale_may_lie_in_the_norm_or_in_the_values(clip):
    before = direction_outputs(clip, [2])
    block, scale = clip.visual.blocks[1], torch.rand(clip.config.vision.width) + 0.5
    with torch.no_grad():
        block.ln_1.weight.mul_(scale)
        block.attn.v.weight.div_(scale)
    torch.testing.assert_close(direction_outputs(clip, [2]), before)


def test_phrases_are_those_of_textspan_on_the_contributions(clip):
    text = torch.randn(40, clip.config.embed_dim, generator=torch.Generator().manual_seed(2))
    moments = weight_moments(clip)
    contributions = torch.einsum("nlhd,lhde->nlhe", direction_outputs(clip), moments.maps)
    assert torch.equal(textspan_moments(moments, text, 4).picks, textspan(contributions, text, 4).picks)


def test_a_head_that_writes_along_a_phrase_is_described_by_it():
    clip, phrase = tiny_clip("gelu"), 7
    text = torch.nn.functional.normalize(torch.randn(30, clip.config.embed_dim), dim=-1)
    visual, size = clip.visual, clip.config.vision.head_width
    carry = visual.ln_post.weight[:, None] * visual.proj  # [D, E]
    carry = carry - carry.mean(dim=0)
    with torch.no_grad():
        along = (
            torch.linalg.pinv(carry.T.double()) @ text[phrase].double()
        )  # what the feature turns into text
        visual.blocks[1].attn.o.weight[:, size : 2 * size] = along.float()[:, None]
    assert textspan_moments(weight_moments(clip, [2]), text, 1).picks[0, 1, 0] == phrase


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_pooling_reads_the_same_row_with_every_head(family):
    clip = model(FAMILIES[family], torch.float32)
    visual, layer, size = clip.visual, 3, clip.config.vision.head_width
    outputs = direction_outputs(clip, [layer])
    contributions = torch.einsum("nlhd,lhde->nlhe", outputs, head_maps(clip, [layer]))
    values = outputs[:, 0, 1, :size]
    with torch.no_grad():
        written = values @ visual.blocks[layer - 1].attn.o.weight[:, size : 2 * size].T
        normed = (written - written.mean(dim=-1, keepdim=True)) * visual.ln_post.weight
        pooled = normed @ visual.pool.attn.v.weight.T @ visual.pool.attn.o.weight.T
        expected = pooled @ visual.projection_matrix()
    torch.testing.assert_close(contributions[:, 0, 1], expected, rtol=1e-3, atol=1e-5)


def test_layers_must_exist(clip):
    with pytest.raises(UsageError, match="99"):
        weight_moments(clip, [99])


def test_no_image_is_read(clip, monkeypatch):
    monkeypatch.setattr(type(clip.visual), "embed", lambda *_: pytest.fail("an image was read"))
    weight_moments(clip)


def test_mini_has_the_concepts_of_its_known_factors():
    """With every default: 30 of the 44 named heads; TEXTSPAN over 2,500 images has 24 of 42."""
    clip, corpus = dear.load("mini"), load_corpus("world")
    texts, features, _ = text_features(clip, corpus.texts)
    picks = textspan_moments(weight_moments(clip, range(9, 13)), features, default_phrases(clip)).picks
    named = right = 0
    for row in json.loads((EMBEDDED / "mini" / "head_truth.json").read_text())["heads"]:
        concepts = Counter(corpus.tags[texts[pick]] for pick in picks[row["layer"] - 9, row["head"]].tolist())
        concept, count = concepts.most_common(1)[0]
        if count >= 0.35 * concepts.total():
            named += 1
            right += concept == max(row["explained"], key=row["explained"].get)
    assert (named, right) == (44, 30)


def test_phrases_of_a_replicate_are_a_bootstrap_sample():
    drawn = draw_phrases(1000, seed=3)
    assert drawn == sorted(set(drawn)) == draw_phrases(1000, seed=3)
    assert drawn != draw_phrases(1000, seed=4)
    assert 0.58 < len(drawn) / 1000 < 0.68  # 1 - 1/e


def test_stability_counts_heads_that_keep_their_role():
    roles = {(1, 0): Role("core", "Color"), (1, 1): Role("mixed")}
    other = {(1, 0): Role("core", "Color"), (1, 1): Role("core", "Shape")}
    samples = []

    def find(rows):
        samples.append(rows)
        return roles if len(samples) % 2 else other

    stability = phrase_stability(find, roles, count=50, replicates=4)
    assert (stability.share, stability.replicates) == (0.75, 4)
    assert samples == [draw_phrases(50, seed) for seed in range(4)]


def test_roles_without_images(tmp_path):
    """The whole discovery on mini: the map is bound to the weights, and says how it was made."""
    roles = discover_roles(dear.load("mini"), source="weights", concepts="tags", replicates=2)
    assert len(roles) == 48
    assert sum(role.kind != "mixed" for _, role in roles) == 44
    assert roles.evidence["source"] == "weights"
    assert "image_count" not in roles.evidence
    assert roles.evidence["stability"]["over"] == "phrases"
    assert roles.evidence["information"]["bits"] > 1.3 * roles.evidence["information"]["rotated"]
    assert role_map_warnings(roles) == []
    roles.save(tmp_path / "roles.json")
    assert RoleMap.load(tmp_path / "roles.json") == roles


@pytest.mark.parametrize(("source", "count"), [("weights", 4), ("images", None), ("noise", None)])
def test_a_source_and_images_must_fit(source, count):
    clip = tiny_clip("gelu")
    images = None if count is None else torch.zeros(count, 3, 32, 32)
    with pytest.raises(RoleError, match=source):
        discover_roles(clip, images, source=source, concepts="tags", corpus="world")
