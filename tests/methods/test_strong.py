"""The recipe `strong`: its parts one by one, its presets, and the mode that knows trained classes."""

from __future__ import annotations

import math

import literal_dear
import pytest
import torch
from tiny import images, mixed_roles, tiny_clip, token_ids

from dear.clip import Clip, ClipConfig
from dear.errors import UsageError
from dear.heads.roles import RoleMap
from dear.methods import MMRL, DeAR, Purify, build_method, find_method
from dear.runs.recipe import Recipe
from dear.train.loop import optimizer_of, rates_of

NAMES = ["cat", "dog", "newt"]


def build(**options) -> DeAR:
    return DeAR(tiny_clip(), NAMES, roles=mixed_roles(), ids=token_ids(), **options)


def test_copies_of_the_class_token_are_one_token_that_counts_more() -> None:
    """delta = 0, no masks, beta = 0, P_attr = P_v: every extra token stays a copy of the class token.

    A sequence with 1 + T equal tokens is the sequence with one of them whose key counts 1 + T times, which
    adds log(1 + T) to the scores of that key. That is computed here without any extra token.
    """
    clip = tiny_clip()
    vision = clip.config.vision
    everywhere = RoleMap.uniform("mixed", range(1, vision.layers + 1), vision.heads)
    model = DeAR(clip, NAMES, roles=everywhere, ids=token_ids(), token_start="class", beta=0.0)
    with torch.no_grad():
        model.tokens.zero_()
    f_cls, f_attr = model.image_features(images())
    torch.testing.assert_close(f_attr, f_cls[:, None].expand_as(f_attr), rtol=0, atol=1e-12)

    w = clip.state_dict()
    x = clip.visual.embed(images())
    for layer in range(1, vision.layers + 1):
        mask = torch.zeros(vision.heads, x.shape[1], x.shape[1], dtype=x.dtype)
        if layer >= model.first:
            mask[:, :, 0] = math.log(1 + len(model.attributes))
        quick = vision.activation == "quick_gelu"
        x = literal_dear.block(w, f"visual.blocks.{layer - 1}", x, vision.heads, mask, quick, vision.eps)
    x = literal_dear.norm(x, w["visual.ln_post.weight"], w["visual.ln_post.bias"], vision.eps)
    torch.testing.assert_close(f_cls, x[:, 0] @ w["visual.proj"], rtol=0, atol=1e-10)


def test_strong_learns_as_many_parameters_as_the_paper() -> None:
    clip = Clip(ClipConfig.named("ViT-B-16"))
    ids = torch.tensor([[49406, 320, 2368, 49407], [49406, 320, 1929, 49407]])
    options = DeAR.preset("strong").options
    model = DeAR(clip, ["cat", "dog"], roles=RoleMap.table2(), ids=ids, **options)
    assert model.trainable_parameters == 399_622


def test_the_recommended_preset_is_strong_and_paper_changes_nothing() -> None:
    for kind in (DeAR, Purify):
        assert list(kind.presets) == ["strong", "paper"]
        assert kind.recommended() == "strong"
        paper = kind.preset("paper")
        assert (dict(paper.options), dict(paper.recipe)) == ({}, {})
        assert kind.configure(kind.preset().options) != kind.Config()
    assert find_method("coop").recommended() is None
    assert dict(find_method("coop").preset().options) == {}
    with pytest.raises(UsageError, match="'dear' has no preset 'weak'; it has strong, paper"):
        DeAR.preset("weak")


def test_alpha_of_the_class_token_starts_where_it_is_told() -> None:
    weights = build(alpha_start=0.4).fusion_weights()
    assert weights["class"] == pytest.approx(0.4)
    assert list(weights.values())[1:] == pytest.approx([0.6 / 5] * 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_ce": 1.5}, "class_ce = 1.5 is not between 0 and 1"),
        ({"text_beta": -0.1}, "text_beta = -0.1 is not between 0 and 1"),
        ({"alpha_start": 1.0}, "alpha_start = 1.0 must be above 0 and below 1"),
        ({"early_rate": 0.0}, "early_rate = 0.0 must be above 0"),
        ({"token_start": "word"}, "token_start 'word' is not known; choose from free, class"),
        ({"novel_mode": "best"}, "novel_mode 'best' is not known; choose from decoupled, fused, blend"),
        ({"blend": -1.0}, "blend = -1.0 cannot be negative"),
    ],
)
def test_values_out_of_range_are_named(options, message) -> None:
    with pytest.raises(UsageError, match=message):
        build(**options)


def test_rates_are_multiples_of_the_recipes_for_the_tensors_that_are_named() -> None:
    model = build(token_rate=5.0, text_rate=3.0, early_tokens=2, early_rate=7.0, projection_rate=0.5)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(learned, Recipe(), rates_of(model))
    multiple = {id(p): group["multiple"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: multiple[id(p)] for name, p in model.named_parameters()}
    assert found == {"tokens": 5.0, "text_tokens": 3.0, "p_attr": 0.5, "v": 1.0, "early_tokens": 7.0}
    gates = Purify(tiny_clip(), NAMES, ids=token_ids(), gate_rate=20.0)
    assert gates.rates() == {"scalars": 20.0}


def blended(model: DeAR, weight: float) -> torch.Tensor:
    """Cosines with the fused feature and with the frozen one, weighed by hand, at CLIP's scale."""
    features = model.image_features(images())
    alpha = list(model.fusion_weights().values())
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)  # noqa: E731
    fused = alpha[0] * unit(features[0])
    for place, share in enumerate(alpha[1:]):
        fused = fused + share * unit(features[1][:, place])
    frozen = unit(model.clip.encode_image(images()))
    mixed = (fused + weight * frozen) / (1 + weight)
    return model.clip.logit_scale * mixed @ model.texts().T


@pytest.mark.parametrize("novel", ["decoupled", "fused", "blend"])
def test_auto_scores_trained_classes_fused_and_others_as_it_is_told(novel: str) -> None:
    model = build(token_start="class", novel_mode=novel, blend=0.4)
    with torch.no_grad():
        model.text_tokens.add_(0.3)
        model.v[0] = 0.5
        trained = model.all_logits(images())
        assert torch.equal(trained["auto"], trained["fused"])
        other = model.with_classes(["dog", "fir"], ids=token_ids((4, 1), seed=5))
        found = other.all_logits(images())
        wanted = blended(other, 0.4) if novel == "blend" else found[novel]
    assert other.trained_classes == tuple(NAMES)
    torch.testing.assert_close(found["auto"][:, 0], found["fused"][:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found["auto"][:, 1], wanted[:, 1], rtol=0, atol=1e-10)
    again = other.with_classes(NAMES, ids=token_ids())  # it still knows what was trained
    assert torch.equal(again.logits(images()), model.logits(images()))


def test_auto_of_mmrl_is_its_authors_rule() -> None:
    model = MMRL(tiny_clip(), NAMES, ids=token_ids())
    other = model.with_classes(["dog", "fir"], ids=token_ids((4, 1), seed=5))
    found = other.all_logits(images())
    assert torch.equal(found["auto"][:, 0], found["fused"][:, 0])
    assert torch.equal(found["auto"][:, 1], found["decoupled"][:, 1])
    assert not torch.allclose(found["fused"], found["decoupled"])


def test_every_method_answers_in_its_usual_mode_on_its_own_classes() -> None:
    for name in ("dear", "mmrl", "mmrlpp"):
        model = build_method(name, tiny_clip(), NAMES, roles=mixed_roles(), ids=token_ids())
        assert model.modes == ("auto", "fused", "decoupled")
        assert model.pick_mode(None) == "auto"
