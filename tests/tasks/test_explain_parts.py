"""Scores taken apart: the parts sum to the logit of every method, and each part is what it says.

Independent ways to the same numbers: features with a head left out of the sum (`Correction.heads`), attention
written out in a loop, and a second pass over changed rows.
"""

from __future__ import annotations

import pytest
import torch
from explain_oracles import NAMES, each_class, method_of, trace
from tiny import images, tiny_clip, token_ids

from dear.clip import Clip
from dear.clip.correction import Correction
from dear.errors import UsageError
from dear.heads.contributions import decompose
from dear.methods import METHODS, Method, build_method
from dear.methods.frozen import Frozen
from dear.tasks.explain.parts import Parts, Trace, means_of

#: what is held beside lengths: their caches are kernels
KERNELS = ("tip-adapter", "tip-adapter-f", "proker")
#: constants of their own: a probe's bias, or additions to the final norm's
BIASED = ("linear-probe", "lp-plus-plus", "skip-tuning", "two-stage")


def mean_part(method: Method) -> torch.Tensor:
    """What the training images' mean, which DeAR takes off, adds to each class's score: [C, 1]."""
    mean = getattr(method, "image_mean", None)
    if mean is None:
        return torch.zeros(len(method.classes), 1)
    return (-method.clip.logit_scale * class_weights_of(method) @ mean).detach()[:, None]


def class_weights_of(method: Method) -> torch.Tensor:
    """What DeAR compares images with, [C, E]: texts with class directions."""
    return method.class_weights(method.texts()).detach()  # type: ignore[operator]


@pytest.mark.parametrize("name", METHODS)
def test_parts_sum_to_the_logit_in_float32(name: str) -> None:
    method = method_of(name, tiny_clip(dtype=torch.float32))
    pixels = images(3, dtype=torch.float32)
    for mode in method.modes:
        found = trace(method, pixels, mode)
        parts = found.parts(each_class(method))
        torch.testing.assert_close(
            parts.total().T.float(), method.logits(pixels, mode), atol=1e-4, rtol=0, msg=mode
        )
        assert parts.linear == (name not in KERNELS)
        if name not in KERNELS + BIASED:  # nothing is left over: the sum is one of parts that have a name
            assert float((parts.rest - mean_part(method)).abs().max()) < 1e-4


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.presets])
def test_parts_sum_to_the_logit_with_every_preset(name: str) -> None:
    clip, pixels = tiny_clip(dtype=torch.float32), images(3, dtype=torch.float32)
    for preset in METHODS[name].presets.values():
        method = method_of(name, clip, **preset.options)
        for mode in method.modes:
            parts = trace(method, pixels, mode).parts(each_class(method), patches=True)
            logits = method.logits(pixels, mode)
            torch.testing.assert_close(parts.total().T.float(), logits, atol=1e-4, rtol=0, msg=mode)
            assert float((parts.rest - mean_part(method)).abs().max()) < 1e-4
            start = parts.start[:, :, 0].abs().max(), parts.heads[:, :, 0, :3].abs().max()
            assert min(map(float, start)) > 0  # the class token is followed back to its embedding


def test_a_focus_is_part_of_its_heads() -> None:
    """Heads that a focus reads beside the feature count with both."""
    clip, pixels = tiny_clip(), images(5)
    focus = ((6, 1), (5, 2))
    method = method_of("lp-plus-plus", clip, focus=focus, focus_weight=0.7, views=0, steps=20)
    found = trace(method, pixels, "default")
    parts = found.parts(each_class(method))
    assert parts.linear
    torch.testing.assert_close(parts.total().T, method.logits(pixels).double(), atol=1e-5, rtol=0)
    # written out: z and c_r less their means, both of unit length, beside the text's part of z
    state = {name: tensor.double() for name, tensor in method.state_dict().items()}
    stage = method.inference_stage(pixels)
    features, terms = stage.x.double(), stage.focus.double()
    whole, heads = (torch.cat([features, terms], dim=-1) - state["reader.mean"]).chunk(2, dim=-1)
    first, second = (state["weight"] / (1 + 0.7**2) ** 0.5).chunk(2, dim=-1)
    length = features.norm(dim=-1, keepdim=True)
    texts = state["alpha"][:, None] * method.prompts.frozen.double()
    frozen = decompose(clip, pixels).heads.double()
    for layer, head in (*focus, (6, 0)):
        own = frozen[:, layer - 1, head]  # [B, E]
        expected = (own / whole.norm(dim=-1, keepdim=True)) @ first.T + own / length @ texts.T
        if (layer, head) in focus:
            expected = expected + 0.7 * (own / heads.norm(dim=-1, keepdim=True)) @ second.T
        torch.testing.assert_close(parts.heads[:, :, 0, layer - 1, head], expected.T, atol=1e-3, rtol=1e-3)
    # without the heads, the focus sees their mean
    without = found.without(focus, means_of([found]))
    mean = terms.mean(0)
    changed = Frozen(features + mean - terms, focus=mean.expand_as(terms))
    expected = method.logits_from_frozen(changed)["default"]
    torch.testing.assert_close(without, expected.detach(), atol=1e-4, rtol=1e-3)


def test_what_is_left_of_a_probe_is_its_bias() -> None:
    method = method_of("linear-probe", tiny_clip())
    parts = trace(method, images(), "default").parts(each_class(method))
    torch.testing.assert_close(parts.rest, method.get_buffer("bias")[:, None].expand(3, 4))


def test_what_is_left_of_a_cache_model_is_the_vote_of_its_cache() -> None:
    method = method_of("tip-adapter", tiny_clip())
    pixels = images()
    parts = trace(method, pixels, "default").parts(each_class(method))
    plain = build_method("zeroshot", method.clip, NAMES, ids=token_ids((20, 18, 19)))
    torch.testing.assert_close(parts.rest.T, method.logits(pixels) - plain.logits(pixels))


def test_heads_are_those_of_the_frozen_decomposition() -> None:
    clip = tiny_clip(dtype=torch.float32)
    method = method_of("zeroshot", clip)
    pixels = images(dtype=torch.float32)
    parts = trace(method, pixels, "default").parts(each_class(method))
    frozen = decompose(clip, pixels)
    unit = clip.logit_scale * method.prompts.frozen / frozen.total().norm(dim=-1)[:, None, None]  # [B, C, E]
    expected = torch.einsum("blhe,bce->cblh", frozen.heads, unit)
    torch.testing.assert_close(parts.heads[:, :, 0].float(), expected, atol=1e-5, rtol=1e-4)


def features_of(method: Method, pixels: torch.Tensor) -> torch.Tensor:
    """Features [B, V, E] that a method compares with texts."""
    with torch.no_grad():
        if method.name == "dear":
            f_cls, f_attr = method.image_features(pixels)  # type: ignore[operator]
            return torch.cat([f_cls[:, None], f_attr], dim=1)
        frozen = method.inference_stage(pixels)
        if method.name == "mmrl":
            return torch.stack(method.features(frozen.x), dim=1)  # type: ignore[operator]
        return method.images_from_frozen(frozen)[:, None]


def weights_of(method: Method) -> torch.Tensor:
    if method.name == "dear":
        return torch.tensor(list(method.fusion_weights().values()))  # type: ignore[operator]
    return torch.tensor([0.7, 0.3]) if method.name == "mmrl" else torch.ones(1)


@pytest.mark.parametrize("name", ["coop", "clip-lora", "purify", "mmrl", "dear", "vpt"])
def test_a_head_is_what_the_score_loses_without_its_term(name: str) -> None:
    """The head left out by the correction of a backbone, with the lengths of the real features."""
    clip = tiny_clip()
    size = clip.config.embed_dim
    # a correction that changes nothing: with any, learned projections read nothing but the feature
    clip = clip.with_correction(Correction(torch.eye(size), torch.zeros(size)))
    method, pixels = method_of(name, clip), images()
    mode = "fused" if "fused" in method.modes else method.modes[0]
    parts = trace(method, pixels, mode).parts(each_class(method))
    whole = features_of(method, pixels)
    texts = (
        class_weights_of(method) if name == "dear" else torch.nn.functional.normalize(method.texts(), dim=-1)
    )
    texts = texts.detach()
    for layer, head in ((6, 0), (5, 3), (5, 1)):
        other = clip.with_correction(Correction(torch.eye(size), torch.zeros(size), ((layer, head),)))
        lost = whole - features_of(method.bind(other), pixels)  # [B, V, E]
        expected = clip.logit_scale * torch.einsum(
            "v,bve,ce->cb", weights_of(method).to(lost), lost / whole.norm(dim=-1, keepdim=True), texts
        )
        found = parts.heads[:, :, :, layer - 1, head].sum(-1)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", ["fused", "decoupled"])
def test_parts_sum_to_the_logit_in_a_list_with_new_classes(mode: str) -> None:
    """What puts trained and new classes on one scale is not linear in the image: it stays in the rest."""
    ids = torch.cat([token_ids((20,)), token_ids((17,), seed=5)])
    method = method_of("dear", tiny_clip()).with_classes(("a cat", "a fir"), ids=ids)
    pixels = images()
    traced = trace(method, pixels, mode)
    parts = traced.parts(each_class(method))
    assert not traced.linear
    torch.testing.assert_close(parts.total().T, method.logits(pixels, mode))
    torch.testing.assert_close(parts.rest[1:], mean_part(method)[1:].expand(-1, len(pixels)))


def test_votes_of_attribute_tokens_are_those_of_dear() -> None:
    method, pixels = method_of("dear", tiny_clip()), images()
    parts = trace(method, pixels, "fused").parts(each_class(method))
    votes = method.votes(pixels)  # type: ignore[operator]
    apart = parts.rows().permute(1, 2, 0)  # [B, 1 + A, C], without the norm's bias, which rows share
    biases = votes.sum(1) - apart.sum(1)
    torch.testing.assert_close(biases, sum(parts.constants.values()).T + parts.rest.T)  # type: ignore[union-attr]
    norm = method.clip.visual.ln_post.bias
    f_cls, f_attr = method.image_features(pixels)  # type: ignore[operator]
    features = torch.cat([f_cls[:, None], f_attr], dim=1).detach()
    constant = torch.stack(
        [norm @ method.clip.visual.projection_matrix(), *([norm @ method.p_attr] * 5)]
    ).detach()
    alpha = method.v.softmax(0).detach()  # type: ignore[union-attr]
    shift = method.clip.logit_scale * torch.einsum(
        "v,bve,ce->bvc", alpha, constant / features.norm(dim=-1, keepdim=True), class_weights_of(method)
    )
    o_biases = (votes - shift - apart).sum(1)
    torch.testing.assert_close(o_biases - mean_part(method).T, parts.constants["output biases"].T)


@pytest.mark.parametrize("name", ["zeroshot", "dear", "vpt", "purify"])
def test_patches_are_attention_times_value(name: str) -> None:
    """A head of the last layer, in a loop over tokens; what patches do not say, other tokens do."""
    clip = tiny_clip()
    method, pixels = method_of(name, clip), images(2)
    seen: list[Parts] = []
    found = trace(method, pixels, method.modes[-1])
    seen.append(found.parts(each_class(method), patches=True))
    final = found._finals[-1]
    layer = clip.config.vision.layers
    block, change = clip.visual.blocks[layer - 1], None
    if final.edit is not None:
        change = final.edit.layers.get(layer)
    x = final.record[f"blocks.{layer - 1}.out"]
    if final.edit is not None and final.edit.count:
        from dear.clip.edit import insert_tokens

        x = insert_tokens(x, final.edit, layer)
    normed = block.ln_1(x)
    pattern = final.record[f"blocks.{layer}.attn.pattern"]
    width = clip.config.vision.head_width
    for head in range(clip.config.vision.heads):
        z = torch.zeros(2, width, dtype=torch.float64)
        for token in range(x.shape[1]):
            value = block.attn.v(normed[:, token])[:, head * width : (head + 1) * width]
            if change is not None and change.v is not None:
                value = value + change.v(normed)[:, head, token]
            z = z + pattern[:, head, 0, token, None] * value
        if change is not None and change.gate is not None:
            z = z * change.gate[head]
        torch.testing.assert_close(
            z.detach(), final.record[f"blocks.{layer}.attn.heads"][:, head, 0].detach()
        )
    parts = seen[0]
    assert parts.patches is not None
    shape = parts.patches.shape
    assert shape[-2:] == (3, 3)
    # columns: the class token's own summand and those of extra tokens are what is missing
    missing = parts.heads - parts.patches.double().sum((-2, -1))
    own = pattern[:, :, 0]
    extra = 0 if final.edit is None else final.edit.count
    others = [0, *range(x.shape[1] - extra, x.shape[1])]
    if final.edit is not None and final.edit.at is not None:
        others = [0, *range(final.edit.at, final.edit.at + extra)]
    values = block.attn.split(block.attn.v(normed))
    if change is not None and change.v is not None:
        values = values + change.v(normed)
    if change is not None and change.gate is not None:
        values = values * change.gate[:, None, None]
    z_others = torch.einsum("bhn,bhnd->bhd", own[..., others], values[:, :, others]).detach()
    z_all = torch.einsum("bhn,bhnd->bhd", own, values).detach()
    # the same direction for all tokens of a head: shares of the output along it agree with shares of parts
    terms = found._terms[-1][0][1]
    way = torch.stack([found._head_gradients(terms, slope) for slope in slopes(found, method)])
    torch.testing.assert_close(
        missing[:, :, 0, layer - 1], (way[:, :, layer - 1] * z_others).sum(-1), atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(
        parts.heads[:, :, 0, layer - 1], (way[:, :, layer - 1] * z_all).sum(-1), atol=1e-9, rtol=1e-6
    )


def slopes(found: Trace, method: Method) -> list[torch.Tensor]:
    """Gradient of each class's logits at the class token's row, with lengths held."""
    leaf = found._finals[-1].final.x
    assert leaf is not None
    return [
        torch.autograd.grad(found._logits[:, c].sum(), leaf, retain_graph=True)[0][:, 0]
        for c in range(len(method.classes))
    ]


@pytest.mark.parametrize("kind", ["heads", "affine"])
@pytest.mark.parametrize("name", ["linear-probe", "dear", "mmrl"])
def test_a_removal_is_a_part_and_heads_left_out_say_nothing(name: str, kind: str) -> None:
    clip = tiny_clip()
    size = clip.config.embed_dim
    generator = torch.Generator().manual_seed(4)
    bias = torch.randn(size, generator=generator) / 4
    heads = ((6, 1), (5, 0)) if kind == "heads" else ()
    matrix = torch.eye(size) + (0.0 if heads else 0.1) * torch.randn(size, size, generator=generator)
    method = method_of(name, clip.with_correction(Correction(matrix, bias, heads)))
    pixels = images()
    mode = method.modes[0]
    parts = trace(method, pixels, mode).parts(each_class(method), patches=True)
    torch.testing.assert_close(parts.total().T, method.logits(pixels, mode).double())
    if name != "linear-probe":
        rest = parts.rest - mean_part(method)
        assert float(rest.abs().max()) < 1e-6  # a correction is float32
    assert float(parts.constants["correction"].abs().max()) > 1e-3
    for layer, head in heads:
        assert float(parts.heads[..., layer - 1, head].abs().max()) == 0
        assert parts.patches is not None
        assert float(parts.patches[..., layer - 1, head, :, :].abs().max()) == 0


@pytest.mark.parametrize("name", ["zeroshot", "linear-probe", "clip-lora", "dear"])
def test_without_heads_is_the_answer_of_features_with_their_mean(name: str) -> None:
    """Against a correction that leaves the heads out and adds their mean contribution."""
    clip = tiny_clip()
    method, pixels = method_of(name, clip), images(5)
    mode = "decoupled" if "decoupled" in method.modes else method.modes[0]
    chosen = ((6, 1), (5, 2))
    found = trace(method, pixels, mode)
    size = clip.config.embed_dim
    left = clip.with_correction(Correction(torch.eye(size), torch.zeros(size), chosen))
    if name in ("zeroshot", "linear-probe"):
        lost = clip.encode_image(pixels) - left.encode_image(pixels)
    else:
        lost = features_of(method, pixels)[:, 0] - features_of(method.bind(left), pixels)[:, 0]
    back = clip.with_correction(Correction(torch.eye(size), lost.mean(0).float(), chosen))
    expected = method.bind(back).logits(pixels, mode)
    torch.testing.assert_close(
        found.without(chosen, means_of([found])),
        expected,
        atol=1e-4,
        rtol=1e-5,  # the bias is float32
    )
    torch.testing.assert_close(found.without((), means_of([found])), method.logits(pixels, mode))


def test_means_are_over_all_traces() -> None:
    method = method_of("dear", tiny_clip())
    pixels = images(5)
    mode = method.modes[0]
    whole = means_of([trace(method, pixels, mode)])
    split = means_of([trace(method, part, mode) for part in pixels.split(2)])
    for one, other in zip(whole, split, strict=True):
        for row in one:
            torch.testing.assert_close(one[row], other[row])


def test_differences_of_classes_are_questions_too() -> None:
    method, pixels = method_of("coop", tiny_clip()), images()
    found = trace(method, pixels, "default")
    question = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)
    alone = found.parts(each_class(method))
    torch.testing.assert_close(found.parts(question).heads[0], alone.heads[0] - alone.heads[1])


def test_a_score_of_nothing_is_refused() -> None:
    clip = tiny_clip()
    with pytest.raises(UsageError):
        Trace(clip, lambda other: torch.zeros(1, 2, dtype=torch.float64))


def test_tracing_leaves_the_gradient_mode_of_the_caller_as_it_is() -> None:
    clip, modes = tiny_clip(dtype=torch.float32), []

    def answer(traced: Clip) -> torch.Tensor:
        with torch.no_grad():
            x = traced.visual.embed(images(2, dtype=torch.float32))
            features = traced.visual.features_from(x)
            modes.append(torch.is_grad_enabled())
        return features @ torch.ones(features.shape[1], 2)

    assert Trace(clip, answer).logits.shape == (2, 2)
    assert modes == [False]
