"""What the other rivals' papers say, checked one by one with loops and by hand."""

from __future__ import annotations

import literal_rivals
import pytest
import torch
import torch.nn.functional as F
from literal_dear import INF, block, norm
from tiny import images, tiny_clip, token_ids

from dear.clip import Record
from dear.errors import UsageError
from dear.heads.roles import RoleMap
from dear.methods import METHODS, Batch, Method, build_method
from dear.methods.prompts import ClassPrompts, ContextPrompts
from dear.methods.rpo import prompt_edit

NAMES = ("red cat", "dog", "very old newt")
LABELS = torch.tensor([0, 2, 1, 2])


def build(name: str, ids: torch.Tensor | None = None, **options) -> Method:
    method = build_method(name, tiny_clip(), NAMES, ids=ids, **options)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)
    return method


def literal_text(method: Method, sentence: str, **how) -> torch.Tensor:
    ids = method.clip.tokenize([sentence.replace("{}", n) for n in NAMES])
    w = method.clip.state_dict()
    if "context" in how:
        how["x"] = literal_rivals.with_context(w, ids, how.pop("context"))
    return literal_rivals.text_features(w, ids, method.clip.config.text, **how)


def literal_logits(method: Method, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    return literal_rivals.logits_of(method.clip.state_dict(), images, texts).detach()


def test_vpt_replaces_its_tokens_at_every_layer() -> None:
    method, pixels = build("vpt", tokens=3), images()
    w, tokens = method.clip.state_dict(), list(method.tokens.detach())
    assert len(tokens) == method.clip.config.vision.layers
    vision = method.clip.config.vision
    x = literal_rivals.image_tokens(w, pixels, vision, tokens[0], literal_rivals.replace_last(tokens))
    expected = literal_logits(method, x[:, 0] @ w["visual.proj"], literal_text(method, "a photo of a {}."))
    torch.testing.assert_close(method.logits(pixels), expected)


def test_cocoop_gives_every_image_its_own_context() -> None:
    method, pixels = build("cocoop"), images(5)
    batch = method.clip.encode_image(pixels)
    rows = []
    for image in batch:
        hidden = method.down @ (image / image.norm()) + method.down_bias
        shift = method.up @ hidden.clamp(min=0) + method.up_bias
        texts = literal_text(method, "a photo of a {}.", context=method.ctx + shift)
        rows.append(literal_logits(method, image[None], texts)[0])
    torch.testing.assert_close(method.logits(pixels), torch.stack(rows))


def test_cocoop_is_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    method, pixels = build("cocoop"), images(5)
    logits = method.logits(pixels)
    monkeypatch.setattr("dear.methods.prompts._TEXTS_AT_ONCE", 4)
    torch.testing.assert_close(method.logits(pixels), logits)


@pytest.mark.parametrize("layer", [None, 1, 5])
def test_tcp_puts_class_aware_vectors_into_the_middle(layer: int | None) -> None:
    method, pixels = build("tcp", layer=layer), images()
    frozen = literal_text(method, "a photo of a {}.")
    hidden = F.normalize(frozen, dim=-1) @ method.down.T + method.down_bias
    class_tokens = ((hidden * torch.sigmoid(1.702 * hidden)) @ method.up.T + method.up_bias).view(3, 4, -1)
    place = layer or 4  # two thirds of five layers are three

    def change(at: int, x: torch.Tensor) -> torch.Tensor:
        if at != place or place == 1:
            return x
        return torch.cat([x[:, :1], class_tokens, x[:, 5:]], 1)

    if place == 1:
        ids = method.clip.tokenize([f"a photo of a {n}." for n in NAMES])
        rows = method.clip.state_dict()["text.tokens"][ids]
        texts = literal_text(
            method, "a photo of a {}.", x=torch.cat([rows[:, :1], class_tokens, rows[:, 5:]], 1)
        )
    else:
        texts = literal_text(method, "a photo of a {}.", context=method.ctx, change=change)
    batch = method.clip.encode_image(pixels)
    torch.testing.assert_close(method.logits(pixels), literal_logits(method, batch, texts))
    distance = (1 - torch.cosine_similarity(texts, frozen)).mean()
    loss = method.loss(pixels, LABELS)
    torch.testing.assert_close(loss.total, loss.parts["ce"] + 8 * distance)


def test_tcp_keeps_the_end_of_the_template() -> None:
    clip = tiny_clip()
    method = build_method("tcp", clip, NAMES, template="art of {}, a type of pet.")
    expected = clip.tokenize([f"a photo of a {n}, a type of pet." for n in NAMES])
    assert torch.equal(method.context.ids, expected[:, : method.context.ids.shape[1]])


def test_kgcoop_weighs_the_distance_to_the_frozen_prompts() -> None:
    method, pixels = build("kgcoop"), images()
    texts = literal_text(method, "a photo of a {}.", context=method.ctx)
    distance = (1 - torch.cosine_similarity(texts, literal_text(method, "a photo of a {}."))).mean()
    loss = method.loss(pixels, LABELS)
    torch.testing.assert_close(loss.parts["knowledge"], distance.detach())
    torch.testing.assert_close(loss.total.detach(), loss.parts["ce"] + 8 * distance.detach())


@pytest.mark.parametrize("seed", range(6))
def test_prograd_takes_out_what_contradicts(seed: int) -> None:
    method, pixels = build("prograd", context=4), images(seed=seed)
    labels = torch.randint(0, 3, (4,), generator=torch.Generator().manual_seed(seed))
    batch = method.clip.encode_image(pixels)
    ctx = method.ctx.detach().clone().requires_grad_()
    logits = literal_rivals.logits_of(
        method.clip.state_dict(), batch, literal_text(method, "X X X X {}.", context=ctx)
    )
    teacher = literal_logits(method, batch, literal_text(method, "a photo of a {}.")).softmax(-1)
    (task,) = torch.autograd.grad(F.cross_entropy(logits, labels), ctx, retain_graph=True)
    kl = (teacher * (teacher.log() - logits.log_softmax(-1))).sum(-1).mean()
    (general,) = torch.autograd.grad(kl, ctx)
    dot = float((task * general).sum())
    expected = task if dot >= 0 else task - dot / float((general**2).sum()) * general
    method.backward(method.loss(pixels, labels), lambda x: 8.0 * x)  # a scaler multiplies, the angle stays
    torch.testing.assert_close(method.ctx.grad, 8.0 * expected)


def test_rpo_prompts_read_and_are_never_read() -> None:
    method, pixels = build("rpo", prompts=3), images()
    visual, w, c = method.clip.visual, method.clip.state_dict(), method.clip.config
    plain, watched = Record(rows=slice(0, 10)), Record(rows=slice(0, 10))
    x = visual.embed(pixels)
    visual.run(x, record=plain)
    visual.run(x, edit=prompt_edit(c.vision.layers, visual.ln_pre(method.image), method.mask), record=watched)
    for layer in range(1, c.vision.layers + 1):
        torch.testing.assert_close(watched[f"blocks.{layer}.out"], plain[f"blocks.{layer}.out"])
    # The literal version: each prompt on its own, behind the originals it reads.
    n = x.shape[1]
    mask = torch.zeros(c.vision.heads, n + 1, n + 1, dtype=x.dtype)
    mask[:, :, n] = INF
    features, texts = [], []
    for k in range(3):
        y = torch.cat([x, visual.ln_pre(method.image[k]).expand(len(x), 1, -1)], 1)
        for layer in range(c.vision.layers):
            y = block(w, f"visual.blocks.{layer}", y, c.vision.heads, mask, True, c.vision.eps)
        features.append(norm(y[:, n], w["visual.ln_post.weight"], w["visual.ln_post.bias"], c.vision.eps))
        rows = []
        for name in NAMES:
            ids = method.clip.tokenize([f"a photo of a {name}."])[0]
            end = int(ids.argmax()) + 1
            y = w["text.tokens"][ids[:end]] + w["text.positions"][:end]
            y = torch.cat([y, method.text[k][None]])[None]
            m = torch.full((end + 1, end + 1), INF, dtype=y.dtype).triu(1)
            m[end, end] = INF
            for layer in range(c.text.layers):
                heads = c.text.heads
                y = block(w, f"text.blocks.{layer}", y, heads, m.expand(heads, -1, -1), True, c.text.eps)
            rows.append(norm(y[0, end], w["text.ln_final.weight"], w["text.ln_final.bias"], c.text.eps))
        texts.append(torch.stack(rows))
    votes = [
        literal_logits(method, i @ w["visual.proj"], t @ w["text.proj"])
        for i, t in zip(features, texts, strict=True)
    ]
    torch.testing.assert_close(method.logits(pixels), sum(votes) / 3)


def test_rpo_starts_around_the_class_token_and_eot() -> None:
    method = build_method("rpo", tiny_clip(), NAMES, prompts=4)
    w = method.clip.state_dict()
    torch.testing.assert_close(
        (method.image - w["visual.class_token"]).norm(dim=-1), torch.full((4,), 0.1).double()
    )
    torch.testing.assert_close(
        (method.text - w["text.tokens"][-1]).norm(dim=-1), torch.full((4,), 0.1).double()
    )


def test_clip_adapter_mixes_a_fifth() -> None:
    method, pixels = build("clip-adapter"), images()
    f = method.clip.encode_image(pixels)
    adapted = ((f @ method.down.T).clamp(min=0) @ method.up.T).clamp(min=0)
    texts = literal_text(method, "a photo of a {}.")
    torch.testing.assert_close(method.logits(pixels), literal_logits(method, 0.2 * adapted + 0.8 * f, texts))


@pytest.mark.parametrize("name", ["tip-adapter", "tip-adapter-f"])
def test_tip_adapter_votes_with_its_cache(name: str) -> None:
    method, pixels = build_method(name, tiny_clip(), NAMES, views=3, alpha=2.0, beta=5.5), images()
    shown, walks = images(5, seed=3), []
    labels = torch.tensor([2, 0, 1, 1, 0])

    def batches(augment: bool):
        assert augment
        noise = 0.1 * images(5, seed=len(walks))
        walks.append(shown + noise)
        yield Batch(walks[-1][:3], labels[:3])
        yield Batch(walks[-1][3:], labels[3:])

    kept = method.keys
    method.prepare(batches)
    assert len(walks) == 3
    if name == "tip-adapter-f":
        assert method.keys is kept, "an optimizer that holds the parameter must see the keys"
    f = F.normalize(method.clip.encode_image(pixels), dim=-1)
    keys = sum(F.normalize(method.clip.encode_image(walk), dim=-1) for walk in walks)
    keys = F.normalize(keys, dim=-1)
    expected = literal_logits(method, f, literal_text(method, "a photo of a {}."))
    for b in range(4):
        for key, label in zip(keys, labels, strict=True):
            expected[b, label] += 2.0 * torch.exp(-5.5 * (1 - f[b] @ key))
    torch.testing.assert_close(method.logits(pixels), expected)


def test_given_ids_are_the_prompts() -> None:
    clip, pixels = tiny_clip(), images()
    texts = [f"a photo of a {name}." for name in NAMES]
    for name in ("coop", "maple", "promptsrc", "kgcoop"):
        by_ids = build_method(name, clip, NAMES, ids=clip.tokenize(texts))
        torch.testing.assert_close(by_ids.logits(pixels), build_method(name, clip, NAMES).logits(pixels))
    with pytest.raises(UsageError, match="16"):
        build_method("prograd", clip, NAMES, ids=token_ids())


def test_short_words_mean_a_random_start() -> None:
    clip = tiny_clip()
    context = ContextPrompts(ClassPrompts(clip, NAMES, "a photo of a {}."), 6, "a photo")
    start = context.start(clip, torch.Generator().manual_seed(0))
    assert context.words == ""
    assert start.shape == (6, 24)
    assert float(start.std()) < 0.03
    with pytest.raises(UsageError, match=r"context.*-1"):
        ContextPrompts(ClassPrompts(clip, NAMES, "a {}"), -1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear-probe", {"start": "middle"}),
        ("clip-lora", {"towers": "none"}),
        ("clip-lora", {"on": ("o",)}),
        ("tip-adapter", {"views": -1}),
        ("maple", {"depth": 99}),
        ("mmrl", {"first_layer": 0}),
        ("tcp", {"layer": 0}),
        ("purify", {"mmd_to": "text"}),
        ("purify", {"bandwidths": (0.0,)}),
        ("purify", {"head_dropout": 1.0}),
    ],
)
def test_values_out_of_range_are_named(name: str, options: dict) -> None:
    with pytest.raises(UsageError) as refusal:
        build_method(name, tiny_clip(), NAMES, **options)
    for option, value in options.items():
        assert option in str(refusal.value)
        assert str(value) in str(refusal.value)


def test_purification_needs_something_to_learn() -> None:
    with pytest.raises(UsageError, match=r"lora.*gates"):
        build_method("purify", tiny_clip(), NAMES, lora="none", gates=False)


def test_numbers_of_vit_b_16() -> None:
    """What the papers report for ViT-B/16 is what our tensors hold."""
    from dear.clip import Clip, ClipConfig

    with torch.device("meta"):
        clip = Clip(ClipConfig.named("ViT-B-16"))
    clip = clip.to_empty(device="cpu")
    for p in clip.parameters():
        torch.nn.init.zeros_(p)

    lora = 10 * 2 + 2 * 8  # ranks over layers
    aligners = sum(w * 512 + 7 * (w + 4 * w + 4 * 512) for w in (768, 512))  # MMRL++: shared, bias, residual
    expected = {
        "zeroshot": 0,
        "linear-probe": 0,  # fitted when it is prepared
        "coop": 4 * 512,
        "cocoop": 4 * 512 + 32 * 513 + 512 * 33,
        "vpt": 12 * 8 * 768,
        "maple": 9 * (2 * 512 + 768 * 513),
        "promptsrc": 9 * 4 * (512 + 768),
        "prograd": 16 * 512,
        "kgcoop": 4 * 512,
        "tcp": 4 * 512 + 128 * 513 + 4 * 512 * 129,
        "clip-adapter": 2 * 512 * 128,
        "tip-adapter": 0,
        "tip-adapter-f": 0,  # a key per training image, once there are any
        "clip-lora": 2 * 3 * 2 * 12 * (768 + 512),
        "rpo": 24 * (768 + 512),
        "mmrl": 5 * 512 + 7 * 513 * (768 + 512) + 768 * 512,
        "mmrlpp": 5 * 512 + aligners + 64 * (768 + 512),
        "dear": 422_663,
        "purify": 2 * lora * (12 * 768 + 768) + 12 * 12,
        # the last six layers of both towers, the last norm and the projection
        "skip-tuning": sum(6 * (12 * w * w + 13 * w) + 2 * w + w * 512 for w in (768, 512)),
        "two-stage": (12 * 4 + 2) * (768 + 512) + 2 * 512,  # norms, and a row per class
        "prolip": 768 * 512,
        "lp-plus-plus": 0,  # in closed form, when it is prepared
        "proker": 0,
    }
    assert expected["maple"] == 3_555_072  # 3.55 M in its paper
    assert expected["mmrl"] == 4_992_256  # 4.992 M
    assert round(expected["mmrlpp"], -3) == 813_000  # 0.813 M
    assert set(expected) == set(METHODS)
    shapes = {
        name: build_method(name, clip, ("a", "b"), roles=RoleMap.table2()).trainable_parameters
        for name in METHODS
    }
    assert shapes == expected
