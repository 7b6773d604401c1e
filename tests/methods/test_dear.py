"""DeAR against the literal step, and every fact that the method's description states."""

from __future__ import annotations

import literal_dear
import pytest
import safetensors.torch
import torch
from tiny import images, mixed_roles, tiny_clip, token_ids

from dear.clip import Clip, ClipConfig, Record
from dear.errors import RoleError, RunError, UsageError
from dear.heads.names import CORE
from dear.heads.role import Role
from dear.heads.roles import RoleMap
from dear.methods import DeAR

NAMES = ["cat", "dog", "newt"]
LABELS = torch.tensor([0, 2, 1, 2])
PAPER = DeAR.preset("paper").options


def build(clip: Clip | None = None, roles: RoleMap | None = None, **options) -> DeAR:
    clip = clip or tiny_clip()
    model = DeAR(clip, NAMES, roles=roles or mixed_roles(), ids=token_ids(), **{**PAPER, **options})
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():  # away from the start, where v = 0 and P_attr = P_v hide mistakes
        for p in (*model.parameters(), *model.buffers()):
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)
    return model


def literal(model: DeAR, pixels: torch.Tensor, labels: torch.Tensor):
    c = model.config
    learned = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    roles = {key: (role.kind, role.concept) for key, role in model.roles}
    options = {
        "first": model.entry,
        "text_first": model.text_first,
        "beta": c.beta,
        "text_beta": c.beta if c.text_beta is None else c.text_beta,
        "start": c.token_start,
        "class_ce": c.class_ce,
        "attributes": list(model.attributes),
        "isolation": c.isolation,
        "lambda_reg": c.lambda_reg,
        "lambda_fusion": c.lambda_fusion,
        "mean": torch.zeros(model.clip.config.embed_dim, dtype=torch.float64),
    }
    if model.image_mean is not None:
        options["mean"] = c.center * model.image_mean
    state = model.clip.state_dict()
    result = literal_dear.step(state, model.clip.config, learned, roles, token_ids(), pixels, labels, options)
    return learned, *result


CASES = {
    "defaults": {},
    "readonly": {"isolation": "readonly"},
    "weights of the loss": {"lambda_fusion": 1.3, "lambda_reg": 0.4},
    "other attributes": {"attributes": ("Texture", "Color", "Animal")},
    "early": {"first_layer": 4, "text_tokens": 2},
    "last layer": {"first_layer": 6},
    "beta 1": {"beta": 1.0},
    "beta 0": {"beta": 0.0},
    "class start": {"token_start": "class", "beta": 0.5},
    "two cross-entropies": {"class_ce": 0.7},
    "two betas": {"beta": 0.2, "text_beta": 0.9},
    "early tokens": {"early_tokens": 3},
    "early tokens in one layer, class start": {
        "early_tokens": 1,
        "first_layer": 3,
        "token_start": "class",
        "roles": mixed_roles(range(3, 7)),
    },
    "early tokens in layer 1, class start": {
        "early_tokens": 4,
        "first_layer": 2,
        "token_start": "class",
        "roles": mixed_roles(range(2, 7)),
    },
    "less a mean": {"center": 0.7, "class_ce": 0.3},
    "strong": dict(DeAR.presets["strong"].options),
    "quick": dict(DeAR.presets["quick"].options),
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_step_equals_the_literal_step(case: str, fused: bool) -> None:
    """Logits, every loss part and every gradient, against separate passes, 77 tokens and full masks."""
    if not fused and case not in ("defaults", "readonly", "other attributes"):
        pytest.skip("the attention's two ways differ by masks alone")
    clip = tiny_clip().use_fused(fused)
    model, pixels = build(clip, **CASES[case]), images()
    learned, fused_logits, decoupled, parts, total = literal(model, pixels, LABELS)
    total.backward()
    loss = model.loss(pixels, LABELS)
    loss.total.backward()
    torch.testing.assert_close(model.logits(pixels), fused_logits.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.logits(pixels, "decoupled"), decoupled.detach(), rtol=1e-9, atol=1e-9)
    assert set(loss.parts) == set(parts)
    for name, part in parts.items():
        torch.testing.assert_close(loss.parts[name], part.detach(), rtol=1e-9, atol=1e-12, msg=name)
    torch.testing.assert_close(loss.total, total, rtol=1e-9, atol=1e-12)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, learned[name].grad, rtol=1e-7, atol=1e-11, msg=name)


@pytest.mark.parametrize("seed", range(4))
def test_step_equals_the_literal_step_for_other_roles_and_activation(seed: int) -> None:
    clip = tiny_clip(seed, activation="gelu")
    model, pixels = build(clip, mixed_roles(seed=seed)), images(seed=seed)
    learned, logits, _, _, total = literal(model, pixels, LABELS)
    total.backward()
    model.loss(pixels, LABELS).total.backward()
    torch.testing.assert_close(model.logits(pixels), logits.detach(), rtol=1e-9, atol=1e-9)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, learned[name].grad, rtol=1e-7, atol=1e-11, msg=name)


def test_numbers_of_vit_b_16() -> None:
    with torch.device("meta"):
        clip = Clip(ClipConfig.named("ViT-B-16"))
    real = Clip.to_empty(clip, device="cpu")
    model = DeAR(real, ["a", "b"], roles=RoleMap.table2(), ids=token_ids((1, 2)), **PAPER)
    assert model.trainable_parameters == 399_622
    assert sum(t.numel() for t in model.adapter_state().values()) == 399_622
    assert len(safetensors.torch.save(model.adapter_state())) < 2_000_000
    assert "Table 2" in (model.notice or "")


@pytest.mark.parametrize("kind", ["generalization", "other"])
def test_all_heads_isolated_leaves_the_class_feature_frozen(kind: str) -> None:
    table = {
        (layer, h): Role(kind, "Animal" if kind == "other" else None) for layer in (5, 6) for h in range(4)
    }
    clip = tiny_clip()
    model = build(clip, RoleMap(table, 4), text_tokens=0)
    frozen = clip.encode_image(images())
    texts = clip.encode_text(token_ids())
    expected = clip.logit_scale * torch.cosine_similarity(frozen[:, None], texts[None], dim=-1)
    torch.testing.assert_close(model.logits(images(), "decoupled"), expected, rtol=1e-10, atol=1e-10)
    assert model.loss(images(), LABELS).parts["reg_image"].abs() < 1e-12


def test_readonly_isolation_also_leaves_the_class_feature_frozen() -> None:
    model = build(roles=RoleMap.uniform("generalization", (5, 6), 4), isolation="readonly")
    assert model.loss(images(), LABELS).parts["reg_image"].abs() < 1e-12
    apart = build(roles=RoleMap.uniform("generalization", (5, 6), 4))
    assert not torch.allclose(model.attribute_features(images()), apart.attribute_features(images()))


def test_beta_one_feeds_every_layer_the_raw_token() -> None:
    """Seen from inside: what layer 6 gets at the token's place is the raw token, whatever layer 5 gave."""
    model = build(beta=1.0)
    inputs = []
    hook = model.clip.visual.blocks[5].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model.logits(images())
    hook.remove()
    tokens = inputs[-1][:, -5:]
    assert torch.equal(tokens, model.tokens.detach().expand_as(tokens))


def test_permuting_attributes_with_their_masks_changes_nothing() -> None:
    order = [3, 0, 4, 2, 1]
    plain = build()
    turned = build(attributes=tuple(CORE[i] for i in order))
    state = plain.adapter_state()
    state["tokens"] = state["tokens"][order]
    state["v"] = state["v"][[0, *(i + 1 for i in order)]]
    turned.load_adapter_state(state)
    torch.testing.assert_close(plain.logits(images()), turned.logits(images()), rtol=1e-10, atol=1e-10)
    features = plain.attribute_features(images())[:, order]
    torch.testing.assert_close(features, turned.attribute_features(images()), rtol=1e-10, atol=1e-10)


def test_padding_of_the_text_changes_nothing() -> None:
    clip, roles = tiny_clip(), mixed_roles()
    full = DeAR(clip, NAMES, roles=roles, ids=token_ids())
    short = DeAR(clip, NAMES, roles=roles, ids=token_ids(context=7))
    assert full.prompts.ids.shape[1] == 7
    torch.testing.assert_close(full.logits(images()), short.logits(images()))


def test_alpha_sums_to_one_and_starts_even() -> None:
    start = DeAR(tiny_clip(), NAMES, roles=mixed_roles(), ids=token_ids()).fusion_weights()
    assert list(start) == ["class", *CORE]
    assert all(abs(a - 1 / 6) < 1e-12 for a in start.values())
    assert abs(sum(build().fusion_weights().values()) - 1) < 1e-12


def test_only_the_learned_tensors_get_gradients() -> None:
    model = build()
    before = {name: tensor.clone() for name, tensor in model.clip.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(images(), LABELS).total.backward()
        optimizer.step()
    assert set(dict(model.named_parameters())) == {"tokens", "text_tokens", "p_attr", "v"}
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert all(p.grad is None for p in model.clip.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.clip.state_dict().items())
    assert set(model.adapter_state()) == {"tokens", "text_tokens", "p_attr", "v"}


def test_the_prefix_runs_once_a_step() -> None:
    """Layers before J: once for both image passes and, for texts, once per task."""
    model = build()
    calls: list[str] = []
    for tower, name in ((model.clip.visual, "v"), (model.clip.text, "t")):
        for i, layer in enumerate(tower.blocks):
            layer.register_forward_hook(lambda *_, tag=f"{name}{i + 1}": calls.append(tag))
    model.loss(images(), LABELS)
    calls.clear()
    model.loss(images(), LABELS)
    assert [calls.count(f"v{i}") for i in range(1, 7)] == [1, 1, 1, 1, 2, 2]
    assert [calls.count(f"t{i}") for i in range(1, 6)] == [0, 0, 0, 1, 1]
    model.logits(images())
    calls.clear()
    model.logits(images())
    assert not any(c.startswith("t") for c in calls)


def test_the_last_layer_computes_only_the_rows_that_are_read() -> None:
    model = build()
    sizes = []
    model.clip.visual.blocks[5].mlp.register_forward_hook(lambda m, i, out: sizes.append(out.shape[1]))
    model.clip.text.blocks[4].mlp.register_forward_hook(lambda m, i, out: sizes.append(out.shape[1]))
    model.loss(images(), LABELS)
    assert sorted(sizes)[:4] == [1, 1, 1, 6]


def test_kept_text_features_follow_the_parameters() -> None:
    model = build()
    before = model.logits(images())
    with torch.no_grad():
        model.text_tokens[:, 0].add_(0.5)
    after = model.logits(images())
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, model(images())["fused"].detach())


def test_with_classes_is_the_same_adapter_on_other_words() -> None:
    model = build()
    ids = token_ids((4, 1), seed=5)
    other = model.with_classes(["fir", "oak"], ids=ids)
    assert other.classes == ("fir", "oak")
    assert all(torch.equal(a, model.adapter_state()[n]) for n, a in other.adapter_state().items())
    fresh = DeAR(model.clip, ["fir", "oak"], roles=model.roles, ids=ids, config=model.config)
    fresh.load_adapter_state(model.adapter_state())
    for mode in ("fused", "decoupled"):
        assert torch.equal(fresh.logits(images(), mode), other.logits(images(), mode))
    again = model.with_classes(NAMES, ids=token_ids())
    assert torch.equal(again.logits(images()), model.logits(images()))


def test_gradient_reaches_pixels_only_when_asked() -> None:
    model = build()
    pixels = images().requires_grad_()
    model(pixels)["fused"].sum().backward()
    assert pixels.grad is not None
    assert pixels.grad.abs().sum() > 0


def test_adapter_state_that_does_not_fit_is_named() -> None:
    model = build()
    state = model.adapter_state()
    state["tokens"] = torch.zeros(4, 36)
    state["stray"] = state.pop("v")
    with pytest.raises(RunError, match=r"v .*stray .*tokens .*\[5, 36\].*\[4, 36\]"):
        model.load_adapter_state(state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 1.5}, "beta"),
        ({"isolation": "none"}, "isolation .*'none'"),
        ({"attributes": ("Color", "color")}, "Color, Color"),
        ({"attributes": ()}, "attributes"),
        ({"first_layer": 7}, "first_layer .*7"),
        ({"color": 1}, "'color'"),
        ({"token_start": "random"}, "token_start .*'random'"),
    ],
)
def test_nonsense_is_refused_with_a_sentence(options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(**options)


def test_roles_are_needed_and_must_fit() -> None:
    clip = tiny_clip()
    with pytest.raises(RoleError, match="discover_roles"):
        DeAR(clip, NAMES, ids=token_ids())
    with pytest.raises(RoleError, match="layer 4"):
        DeAR(clip, NAMES, roles=mixed_roles(range(5, 7)), ids=token_ids(), first_layer=4)
    with pytest.raises(RoleError):
        DeAR(clip, NAMES, roles=RoleMap.table2(), ids=token_ids())


def test_attribute_names_in_any_case() -> None:
    model = build()
    assert [model.attribute_index(n) for n in ("color", "Color", "LOCATION")] == [0, 0, 4]
    with pytest.raises(UsageError, match="'smell'"):
        model.attribute_index("smell")


def test_attention_recorded_in_masked_heads_obeys_the_mask() -> None:
    model = build()
    record = Record(rows=slice(None), pattern=True)
    visual = model.clip.visual
    visual.run(visual.embed(images()), edit=model.attribute_edit(model.tokens, None), record=record)
    pattern = record["blocks.5.attn.pattern"]  # [B, H, 15, 15]
    hidden = model.masks[5].additive(10, pattern.device, pattern.dtype) == float("-inf")
    assert (pattern[:, hidden] == 0).all()
    assert (pattern.sum(-1) - 1).abs().max() < 1e-12


def test_an_attribute_that_is_no_concept_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'Weather'.*Color"):
        build(attributes=("Color", "Weather"))
