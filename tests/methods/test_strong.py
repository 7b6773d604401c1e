"""The recipe `strong`: its parts one by one, and its presets."""

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
from dear.methods.frozen import Batch
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
    model = DeAR(clip, NAMES, roles=everywhere, ids=token_ids(), early_tokens=0, beta=0.0)
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


def test_what_strong_learns_on_vit_b_16() -> None:
    clip = Clip(ClipConfig.named("ViT-B-16"))
    ids = torch.tensor([[49406, 320, 2368, 49407], [49406, 320, 1929, 49407]])
    model = DeAR(clip, ["cat", "dog"], roles=RoleMap.table2(), ids=ids)
    early = 6 * 5 * 768  # five tokens in each of layers 3 to 8
    assert model.trainable_parameters == 399_622 + early + 1  # lambda of the class directions
    assert model.first == 3


def test_a_method_built_by_hand_has_the_recipe_strong() -> None:
    for kind, names in ((DeAR, ["strong", "quick", "paper"]), (Purify, ["strong", "paper"])):
        assert list(kind.presets) == names
        assert kind.recommended() == "strong"
        strong, paper = kind.preset(), kind.preset("paper")
        assert kind.configure(strong.options) == kind.Config() != kind.configure(paper.options)
        assert Recipe.of(kind, **strong.recipe) == Recipe.of(kind) != Recipe.of(kind, **paper.recipe)
    assert find_method("coop").recommended() is None
    assert dict(find_method("coop").preset().options) == {}
    with pytest.raises(UsageError, match=r"'weak'.*quick"):
        DeAR.preset("weak")


@pytest.mark.parametrize(
    "options",
    [
        {"class_ce": 1.5},
        {"text_beta": -0.1},
        {"early_rate": 0.0},
        {"token_start": "word"},
        {"early_tokens": -1},
        {"first_layer": 1},
    ],
)
def test_values_out_of_range_are_named(options) -> None:
    with pytest.raises(UsageError) as refusal:
        build(**{"early_tokens": 2, **options})
    for option, value in options.items():
        assert option in str(refusal.value)
        assert str(value) in str(refusal.value)


def test_rates_are_multiples_of_the_recipes_for_the_tensors_that_are_named() -> None:
    model = build(token_rate=5.0, text_rate=3.0, early_tokens=2, early_rate=7.0, projection_rate=0.5)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(learned, Recipe(), rates_of(model))
    multiple = {id(p): group["multiple"] for group in optimizer.param_groups for p in group["params"]}
    rate_of = {name: multiple[id(p)] for name, p in model.named_parameters()}
    rates = {"tokens": 5.0, "text_tokens": 3.0, "p_attr": 0.5, "v": 100.0, "early_tokens": 7.0}
    assert rate_of == {**rates, "log_direction_weight": 30.0}
    gates = Purify(tiny_clip(), NAMES, ids=token_ids(), gate_rate=20.0)
    assert gates.scalars.lr_scale == 20.0


def test_auto_of_mmrl_is_its_authors_rule() -> None:
    model = MMRL(tiny_clip(), NAMES, ids=token_ids())
    other = model.with_classes(["dog", "fir"], ids=token_ids((4, 1), seed=5))
    logits = other.all_logits(images())
    assert torch.equal(logits["auto"][:, 0], logits["fused"][:, 0])
    assert torch.equal(logits["auto"][:, 1], logits["decoupled"][:, 1])
    assert not torch.allclose(logits["fused"], logits["decoupled"])


def test_usual_modes() -> None:
    usual = {"dear": "fused", "mmrl": "auto", "mmrlpp": "auto"}
    for name, mode in usual.items():
        model = build_method(name, tiny_clip(), NAMES, roles=mixed_roles(), ids=token_ids())
        assert {"fused", "decoupled"} <= set(model.modes)
        assert model.pick_mode(None) == mode


def test_a_new_class_has_the_same_logit_in_every_list() -> None:
    model = prepared()
    ids = token_ids((4, 1), seed=5)
    other = model.with_classes(["dog", "fir"], ids=ids)
    alone = model.with_classes(["fir"], ids=ids[1:])
    assert other.trained_classes == alone.trained_classes == tuple(NAMES)
    for mode in model.modes:
        torch.testing.assert_close(
            other.logits(images(), mode)[:, 1:], alone.logits(images(), mode), rtol=0, atol=1e-12
        )


def prepared(**options) -> DeAR:
    """With tensors that are no longer those of the start, and means over seven images."""
    model = build(**options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)
    labels = torch.tensor([0, 2, 1, 2])
    model.prepare(lambda augment: iter([Batch(images(), labels), Batch(images(3, seed=8), labels[:3])]))
    return model


def test_the_mean_of_the_training_images_is_taken_off_every_feature() -> None:
    """Written out: the score of a class falls by the mean image's score, more for classes it is close to."""
    plain, model, share = prepared(center=0.0), prepared(center=0.4), 0.4
    plain.log_direction_weight.data.copy_(model.log_direction_weight)  # its start depends on the center
    frozen = model.clip.encode_image(torch.cat([images(), images(3, seed=8)]))
    mean = torch.nn.functional.normalize(frozen, dim=1).mean(dim=0)
    pixels = images(5, seed=2)
    bias = share * model.clip.logit_scale * mean @ model.class_weights(model.texts()).T
    for mode in model.modes:
        expected = plain.logits(pixels, mode) - bias
        torch.testing.assert_close(model.logits(pixels, mode), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.votes(pixels).sum(dim=1), model.logits(pixels), rtol=0, atol=1e-6)
    new = model.with_classes(["fir"], ids=token_ids((4,), seed=5))
    assert torch.equal(new.image_mean, model.image_mean)


def test_training_sees_the_answer_that_is_given() -> None:
    """Without directions; `test_directions` compares the loss with directions with a refit per image."""
    model, labels = prepared(directions="none"), torch.tensor([0, 2, 1, 2])
    parts = model.loss(images(), labels).parts
    for part, mode in (("ce", "fused"), ("ce_class", "decoupled")):
        expected = torch.nn.functional.cross_entropy(model.logits(images(), mode), labels)
        torch.testing.assert_close(parts[part], expected, rtol=0, atol=1e-9)


def test_early_tokens_are_gone_where_attribute_tokens_enter() -> None:
    """With early tokens of beta 1 that every head ignores, nothing changes; the restart sees none of them."""
    model = build(early_tokens=3, token_start="class")
    assert (model.first, model.entry) == (2, 5)
    lengths = []
    for block in model.clip.visual.blocks:
        block.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    stage = model.inference_stage(images())
    frozen = model.clip.visual.prefix(images(), 5)
    torch.testing.assert_close(stage.class_token, frozen[:, :1], rtol=0, atol=1e-12)
    lengths.clear()
    model.logits_from_frozen(stage)
    length = stage.x.shape[1]
    assert lengths == [length + 3] * 3 + [length + 5] * 2


def test_the_frozen_pass_ends_with_the_class_token_unless_more_is_read() -> None:
    model = build(early_tokens=3, token_start="class")
    rows = []
    last = model.clip.visual.blocks[model.entry - 2]
    last.mlp.register_forward_hook(lambda _, __, out: rows.append(out.shape[1]))
    alone = model.inference_stage(images())
    stage = model.inference_stage(images(), model.clip)
    assert rows == [1, stage.x.shape[1]]
    torch.testing.assert_close(alone.class_token, stage.class_token, rtol=0, atol=1e-12)
