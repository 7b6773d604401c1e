"""DeAR with a focus: what the heads of a role contribute votes as well."""

from __future__ import annotations

import pytest
import torch
from explain_oracles import each_class, trace
from tiny import images, mixed_roles, tiny_clip, token_ids

from dear.clip import Clip
from dear.clip.correction import Correction
from dear.heads import decompose
from dear.methods import DeAR
from dear.methods.frozen import Batch
from dear.serve import mixed_batch

NAMES = ["cat", "dog", "newt"]
HEADS = ((5, 0), (6, 1))
LABELS = torch.tensor([0, 2, 1, 2])


def build(clip: Clip | None = None, seed: int = 1, focus=HEADS, **options) -> DeAR:
    model = DeAR(
        clip or tiny_clip(), NAMES, roles=mixed_roles(), ids=token_ids(), seed=seed, focus=focus, **options
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)
    model.prepare(lambda augment: iter([Batch(images(), LABELS), Batch(images(3, seed=8), LABELS[:3])]))
    return model


@pytest.mark.parametrize("options", [{}, DeAR.preset("paper").options, DeAR.preset("quick").options], ids=len)
def test_the_heads_vote_with_their_share(options) -> None:
    model, share = build(focus_share=0.3, **options), 0.3
    plain = DeAR(model.clip, NAMES, roles=model.roles, ids=token_ids(), **options)
    plain.load_adapter_state({k: v for k, v in model.adapter_state().items() if k != "focus_mean"})

    def terms(pixels: torch.Tensor) -> torch.Tensor:
        parts = decompose(model.clip, pixels).heads.double()  # terms are in float32
        return sum(parts[:, layer - 1, head] for layer, head in HEADS)

    training = torch.cat([images(), images(3, seed=8)])
    pixels = images(5, seed=2)
    centered = terms(pixels) - terms(training).mean(dim=0)
    weights = model.class_weights(model.texts())
    heads = torch.nn.functional.normalize(centered, dim=1) @ weights.T * model.clip.logit_scale
    expected = (1 - share) * plain.logits(pixels, "fused") + share * heads
    torch.testing.assert_close(model.logits(pixels, "fused"), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.logits(pixels, "decoupled"), plain.logits(pixels, "decoupled"))
    torch.testing.assert_close(model.votes(pixels).sum(dim=1), expected, rtol=1e-5, atol=1e-5)
    assert model.fusion_weights()["focus"] == pytest.approx(share)
    assert sum(model.fusion_weights().values()) == pytest.approx(1)
    assert model.attribute_features(pixels).shape[1] == len(model.attributes)


def test_heads_before_the_first_token_can_be_focused_on() -> None:
    late, early = build(focus=((1, 2),)), build(focus=((1, 2),), early_tokens=0, first_layer=6)
    for model in (late, early):
        terms = model.inference_stage(images()).focus
        torch.testing.assert_close(terms.float(), decompose(model.clip, images()).heads[:, 0, 2])


def test_a_mixed_batch_answers_as_each_alone() -> None:
    clip = tiny_clip()
    width = clip.config.embed_dim
    other = clip.with_correction(Correction(torch.eye(width) * 1.5, torch.ones(width)))
    models = [build(clip), build(clip, 2), build(other, 3), build(clip, 4, HEADS[:1]), build(clip, 5, ())]
    models += [build(clip, 6, focus_share=0.5), models[0]]
    pixels = images(len(models))
    for one, model, row in zip(mixed_batch.logits(models, pixels), models, range(len(models)), strict=True):
        torch.testing.assert_close(one, model.logits(pixels[row : row + 1])[0], rtol=1e-5, atol=1e-5)


def test_an_explanation_takes_the_vote_of_the_heads_apart() -> None:
    model = build()
    for mean in (model.focus_mean, model.image_mean):
        mean.zero_()  # else their parts of the score, the same for every image, are in `rest`
    parts = trace(model, images(), "fused").parts(each_class(model))
    torch.testing.assert_close(parts.total().T, model.logits(images(), "fused"), rtol=1e-6, atol=1e-6)
    assert parts.rest.abs().max() < 1e-4
