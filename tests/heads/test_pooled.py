"""Contributions in towers with attention pooling, against the pooled vector computed term by term."""

from __future__ import annotations

import pytest
import torch
from other_families import FAMILIES, model
from tiny import images

from dear.clip import Record
from dear.errors import UsageError
from dear.heads.activations import attention_maps
from dear.heads.contributions import decompose, head_maps, head_outputs
from dear.heads.corpus import Corpus, load_corpus
from dear.heads.discover import discover_roles
from dear.tasks.roles.evidence import HeadEvidence
from dear.tasks.roles.quality import map_quality


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_and_rest_sum_to_the_feature_and_the_share_is_the_measured_one(family: str) -> None:
    clip = model(FAMILIES[family], torch.float32)
    pixels = images(3, size=clip.config.vision.image_size, dtype=torch.float32)
    parts = decompose(clip, pixels, [2, 5])
    assert parts.heads.shape == (3, 2, 4, clip.config.embed_dim)
    torch.testing.assert_close(parts.total(), clip.encode_image(pixels), rtol=1e-4, atol=1e-4)
    visual, pool = clip.visual, clip.visual.pool
    with torch.no_grad():
        rows = visual.ln_post(visual.run(visual.embed(pixels)))
        pooled = pool.attn.merge(pool.read(rows)[0])[:, 0]  # before the MLP
        linear, feature = visual.project_pooled(pooled), clip.encode_image(pixels)
    share = (linear * feature).sum(-1) / feature.square().sum(-1)
    torch.testing.assert_close(parts.explained, share, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(share, torch.ones(3), atol=1e-3), "the MLP takes part: never exact"
    bias = visual.project_pooled(pool.attn.o.bias)  # project_pooled(0) is the projection's own bias
    torch.testing.assert_close(parts.pool_heads.sum(1) + bias, linear, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_heads_term_is_what_the_pooled_vector_loses_without_it(family: str) -> None:
    """Held pattern and statistics: take the head's rows out of the sum by hand and pool what is left."""
    clip = model(FAMILIES[family])
    visual, pool, layer, head = clip.visual, clip.visual.pool, 4, 2
    pixels = images(2, size=clip.config.vision.image_size)
    record = Record(slice(None))
    with torch.no_grad():
        x = visual.run(visual.embed(pixels), record=record)
        _, pattern = pool.read(visual.ln_post(x), fused=False)  # [B, G, 1, N]
        width = clip.config.vision.head_width
        weight = visual.blocks[layer - 1].attn.o.weight[:, head * width : (head + 1) * width]
        added = record[f"blocks.{layer}.attn.heads"][:, head] @ weight.T  # [B, N, D]
        spread = (x.var(-1, keepdim=True, unbiased=False) + visual.ln_post.eps).sqrt()
        carried = (added - added.mean(-1, keepdim=True)) / spread * visual.ln_post.weight
        values = torch.nn.functional.linear(carried, pool.attn.v.weight).unflatten(-1, (pool.attn.heads, -1))
        merged = torch.einsum("bgn,bngk->bgk", pattern[:, :, 0], values).flatten(1)
        expected = merged @ pool.attn.o.weight.T @ visual.projection_matrix()
    contribution = decompose(clip, pixels, [layer]).heads[:, 0, head]
    torch.testing.assert_close(contribution, expected.float(), rtol=1e-4, atol=1e-5)
    small = head_outputs(clip, pixels, [layer]).outputs[:, 0, head] @ head_maps(clip, [layer])[0, head]
    torch.testing.assert_close(small, contribution)


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_come_with_the_share_that_heads_explain(family: str) -> None:
    clip = model(FAMILIES[family], torch.float32)
    pixels = images(8, size=clip.config.vision.image_size, dtype=torch.float32)
    words = Corpus("some", load_corpus().phrases[::60])
    roles = discover_roles(clip, pixels, layers=[5, 6], corpus=words, phrases=3, concepts="tags")
    share = decompose(clip, pixels).explained
    assert share is not None
    assert roles.evidence["linear_share"] == pytest.approx(float(share.mean()), abs=1e-3)
    sentences = " ".join(sentence for sentence, _ in map_quality(roles, HeadEvidence()))
    assert f"{share.mean():.1%}" in sentences
    assert "exact" not in sentences


def test_attention_maps_need_a_class_token() -> None:
    clip = model(FAMILIES["siglip"])
    with pytest.raises(UsageError, match="class token"):
        attention_maps(clip, images(1, size=26), [(4, 1)])
