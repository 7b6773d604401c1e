"""Images that activate a head, and where it looks."""

import torch
from heads_oracles import tiny_clip

from dear.heads.activations import activating_images, attention_maps
from dear.heads.collect import collect_contributions
from dear.heads.contributions import decompose


def test_order_is_that_of_the_projected_contributions(clip, images):
    contributions = collect_contributions(clip, images)
    text = torch.randn(20, generator=torch.Generator().manual_seed(8))
    activating = activating_images(contributions, (3, 1), text, "a phrase", top=3)
    terms = decompose(clip, images).heads[:, 2, 1]
    scores = (terms - terms.mean(0)) @ (text / text.norm())
    torch.testing.assert_close(activating.scores, scores, rtol=1e-3, atol=1e-4)
    assert list(activating.most) == scores.argsort(descending=True)[:3].tolist()
    assert list(activating.least) == scores.argsort()[:3].tolist()
    assert activating.phrase == "a phrase"


def test_principal_direction_and_few_images(images):
    contributions = collect_contributions(tiny_clip(), images[:5])
    activating = activating_images(contributions, (4, 0), top=4)
    assert activating.phrase is None
    assert len(activating.most) == len(activating.least) == 2
    assert not set(activating.most) & set(activating.least)


def test_attention_maps_are_attention_times_what_the_values_write(clip, images):
    """By hand: hide a patch from a head (zero its attention weight) and see how long the loss is."""
    keys = [(4, 2), (2, 0), (4, 0)]
    maps = attention_maps(clip, images[:2], keys)
    assert maps.shape == (3, 2, 4, 4)
    assert (maps >= 0).all()
    block, visual = clip.visual.blocks[3], clip.visual
    x = visual.run(visual.embed(images[:2]), last=3)
    y = block.ln_1(x)
    q, k, v = (linear(y)[..., 16:24] for linear in (block.attn.q, block.attn.k, block.attn.v))
    weights = torch.softmax(q[:, 0, None] @ k.transpose(1, 2) / 8**0.5, -1)[:, 0]  # [B, N]
    out = block.attn.o.weight[:, 16:24].T
    out = ((out - out.mean(1, keepdim=True)) * visual.ln_post.weight) @ visual.proj
    for patch in range(16):
        lost = (weights[:, 1 + patch, None] * v[:, 1 + patch]) @ out
        torch.testing.assert_close(maps[0, :, patch // 4, patch % 4], lost.norm(dim=-1), rtol=1e-3, atol=1e-5)
