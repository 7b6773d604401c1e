"""SkipTuning, 2SFS, ProLIP, LP++ and ProKeR against written-out versions that share no code with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from literal_rivals import cross_entropy, image_tokens, logits_of, text_features
from tiny import Colors, images, tiny_clip

from dear.errors import UsageError
from dear.methods import Batch, Method, ZeroShot, build_method
from dear.methods.lp_plus_plus import fit as fit_lp
from dear.runs.folder import load_run
from dear.runs.recipe import Recipe
from dear.train.run import train

NAMES = ("red cat", "dog", "very old newt", "sea", "lamp")
LABELS = torch.tensor([0, 2, 1, 2, 4, 3])


def build(name: str, **options: object) -> Method:
    return build_method(name, tiny_clip(), NAMES, **options)


def prepared(name: str, **options: object) -> Method:
    method = build(name, **options)
    method.prepare(lambda augment: iter([Batch(images(6), LABELS)]))
    return method


def scattered(method: Method, size: float = 0.05) -> Method:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * size)
    return method


def prompt_ids(method: Method, names: tuple[str, ...] = NAMES) -> torch.Tensor:
    return method.clip.tokenize([f"a photo of a {name}." for name in names])


def changed_weights(method: Method) -> dict[str, torch.Tensor]:
    """The backbone's state dict with everything learned added by hand, as leaves that ask for gradients."""
    weights = {k: v.clone() for k, v in method.clip.state_dict().items()}
    ends = {"image": ("visual", "ln_post"), "text": ("text", "ln_final")}
    for key, change in method.named_parameters():
        if key == "classifier":
            continue
        side, rest = key.split("_", 1)
        tower, norm = ends[side]
        if rest.startswith("end_norm_"):
            name = f"{tower}.{norm}.{rest.removeprefix('end_norm_')}"
        elif rest == "projection":
            name = f"{tower}.proj"
        else:
            layer, parameter = rest.split("_", 1)
            parts = [
                n
                for n in weights
                if n.startswith(f"{tower}.blocks.{int(layer) - 1}.")
                and n.split(".", 3)[3].replace(".", "_") == parameter
            ]
            (name,) = parts
        weights[name] = (weights[name] + change.detach()).requires_grad_()
    return weights


def literal_features(method: Method, weights: dict[str, torch.Tensor], pixels: torch.Tensor):
    config = method.clip.config
    features = image_tokens(weights, pixels, config.vision)[:, 0] @ weights["visual.proj"]
    return features, text_features(weights, prompt_ids(method), config.text)


# -- SkipTuning ---------------------------------------------------------------------------------------


def literal_choice(method: Method, features: torch.Tensor) -> list[int]:
    """The classes of a step, by a loop: true classes first, then by their largest cosine with an image."""
    frozen = ZeroShot(method.clip, NAMES).prompts.frozen
    best = {}
    for c in range(len(NAMES)):
        cosines = [float(F.cosine_similarity(features[i], frozen[c], dim=0)) for i in range(len(features))]
        best[c] = math.inf if c in LABELS[: len(features)].tolist() else max(cosines)
    order = sorted(best, key=lambda c: -best[c])
    return sorted(order[rank] for rank in method.ranks.tolist())


def test_skip_tuning_equals_towers_whose_weights_were_changed() -> None:
    method, pixels = scattered(build("skip-tuning")), images(3)
    weights = changed_weights(method)
    image, text = literal_features(method, weights, pixels)
    torch.testing.assert_close(method.logits(pixels), logits_of(weights, image, text).detach())
    labels = LABELS[:3]
    chosen = literal_choice(method, image.detach())
    assert set(labels.tolist()) <= set(chosen)
    among = torch.tensor([chosen.index(int(label)) for label in labels])
    loss = cross_entropy(logits_of(weights, image, text[chosen]), among)
    loss.backward()
    ours = method.loss(pixels, labels)
    torch.testing.assert_close(ours.total, loss)
    ours.total.backward()
    for key, name in (
        ("image_5_attn_q_weight", "visual.blocks.4.attn.q.weight"),
        ("image_6_mlp_down_bias", "visual.blocks.5.mlp.down.bias"),
        ("text_4_ln_2_weight", "text.blocks.3.ln_2.weight"),
        ("text_projection", "text.proj"),
        ("image_end_norm_bias", "visual.ln_post.bias"),
    ):
        torch.testing.assert_close(method.get_parameter(key).grad, weights[name].grad)


def test_skip_tuning_leaves_the_lower_half_alone_and_takes_half_of_the_classes() -> None:
    method = build("skip-tuning", tail=1e-9)
    parts = [name.split("_") for name, _ in method.named_parameters()]
    layers = {(part[0], int(part[1])) for part in parts if part[1].isdigit()}
    assert layers == {("image", n) for n in (4, 5, 6)} | {("text", n) for n in (3, 4, 5)}
    assert method.ranks.tolist()[:3] == [0, 1, 2]  # half of five classes, rounded up
    assert len(build("skip-tuning", class_share=1.0).ranks) == len(NAMES)
    assert build("skip-tuning", most_classes=1, tail=1e-9).ranks.tolist()[:1] == [0]


def test_skip_tuning_saves_differences_in_half_precision(tmp_path) -> None:
    clip = tiny_clip(dtype=torch.float32)
    method = build_method("skip-tuning", clip, ("red", "green", "blue"))
    train(method, Colors(), Recipe.of(method, epochs=2, lr=1e-3), tmp_path / "run")
    assert all(tensor.dtype == torch.float16 for tensor in method.adapter_state().values())
    assert any(bool(tensor.any()) for tensor in method.adapter_state().values())
    size = (tmp_path / "run" / "adapter.safetensors").stat().st_size
    assert size < 2.1 * method.trainable_parameters + 20_000
    loaded = load_run(tmp_path / "run", clip)
    pixels = images(2, dtype=torch.float32)
    assert torch.equal(loaded.logits(pixels), method.logits(pixels))


# -- 2SFS ---------------------------------------------------------------------------------------------


def test_two_stage_trains_norms_then_a_classifier() -> None:
    method, pixels = scattered(build("two-stage")), images(4)
    with torch.no_grad():
        method.classifier.zero_()
    weights = changed_weights(method)
    assert all("ln_" in name for name, tensor in weights.items() if tensor.requires_grad)
    image, text = literal_features(method, weights, pixels)
    torch.testing.assert_close(method.logits(pixels), logits_of(weights, image, text).detach())
    loss = cross_entropy(logits_of(weights, image, text), LABELS[:4])
    loss.backward()
    ours = method.loss(pixels, LABELS[:4])
    torch.testing.assert_close(ours.total, loss)
    ours.total.backward()
    torch.testing.assert_close(method.image_2_ln_1_weight.grad, weights["visual.blocks.1.ln_1.weight"].grad)
    assert method.classifier.grad is None

    before = method.logits(pixels)
    method.after_epoch(5, 10)
    assert int(method.stage) == 1
    method.after_epoch(6, 10)
    assert int(method.stage) == 2
    torch.testing.assert_close(method.logits(pixels), before)  # the classifier starts at the text features
    method.zero_grad(set_to_none=True)
    method.loss(pixels, LABELS[:4]).total.backward()
    assert [name for name, p in method.named_parameters() if p.grad is not None] == ["classifier"]


def test_two_stage_new_classes_take_the_adapted_text_features() -> None:
    method, pixels = scattered(build("two-stage")), images(4)
    method.after_epoch(6, 10)
    with torch.no_grad():
        method.classifier.mul_(-1)  # so that rows of the classifier and text features cannot be confused
    new = ("house", "dog", "tree")
    logits = method.with_classes(new).logits(pixels)
    weights = changed_weights(method)
    image, _ = literal_features(method, weights, pixels)
    texts = text_features(weights, prompt_ids(method, new), method.clip.config.text)
    expected = logits_of(weights, image, texts).detach()
    torch.testing.assert_close(logits[:, [0, 2]], expected[:, [0, 2]])
    torch.testing.assert_close(logits[:, 1], method.logits(pixels)[:, NAMES.index("dog")])


# -- ProLIP -------------------------------------------------------------------------------------------


def test_prolip_equals_its_formula() -> None:
    method, pixels = scattered(prepared("prolip")), images(4)
    weights = method.clip.state_dict()
    config = method.clip.config
    rows = image_tokens(weights, pixels, config.vision)[:, 0]
    text = text_features(weights, prompt_ids(method), config.text)
    projection = method.projection.detach().clone().requires_grad_()
    logits = logits_of(weights, rows @ projection, text)
    penalty = len(NAMES) / len(LABELS)  # 1 / images per class
    loss = cross_entropy(logits, LABELS[:4]) + penalty * ((projection - weights["visual.proj"]) ** 2).sum()
    loss.backward()
    ours = method.loss(pixels, LABELS[:4])
    torch.testing.assert_close(ours.total, loss)
    ours.total.backward()
    torch.testing.assert_close(method.projection.grad, projection.grad)
    torch.testing.assert_close(method.logits(pixels), logits.detach())


def test_prolip_learns_the_projection_alone() -> None:
    method = build("prolip", weight=0.5)
    width, features = method.clip.config.vision.width, method.clip.config.embed_dim
    assert method.trainable_parameters == width * features
    assert float(method.penalty) == 0.5
    with pytest.raises(UsageError, match="weight"):
        build("prolip", weight=-1)


# -- LP++ ---------------------------------------------------------------------------------------------


def literal_lp(features, labels, texts, steps):
    """The published loop by autograd: SGD with momentum for w and b, a plain step for alpha every tenth."""
    count, classes = len(features), len(texts)
    w = torch.zeros(classes, features.shape[1], dtype=torch.float64)
    for feature, label in zip(features, labels, strict=True):
        w[label] += feature
    means = []
    for c in range(classes):
        cosines = [float(features[i] @ texts[c]) for i in range(count) if labels[i] == c]
        means.append(sum(cosines) / len(cosines))
    alpha = torch.full((classes,), 250 * sum(means) / classes, dtype=torch.float64, requires_grad=True)
    w.requires_grad_()
    b = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    rate = 4 * count / float(np.linalg.eigvalsh((features.T @ features).numpy()).max())
    rate_alpha = count / (4 * max(float(((features @ t) ** 2).sum()) for t in texts))
    optimizer = torch.optim.SGD([w, b], rate, momentum=0.9)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        alpha.grad = None
        loss = cross_entropy(features @ w.T + b + alpha * (features @ texts.T), labels)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            alpha.data -= rate_alpha * alpha.grad
    return w.detach(), b.detach(), alpha.detach()


@pytest.mark.parametrize("steps", [0, 9, 10, 35])
def test_lp_plus_plus_equals_the_published_loop(steps: int) -> None:
    method, pixels = prepared("lp-plus-plus", steps=steps, views=0), images(6)
    features = F.normalize(method.clip.encode_image(pixels), dim=-1)
    texts = method.prompts.frozen
    w, b, alpha = literal_lp(features, LABELS, texts, steps)
    torch.testing.assert_close(method.weight, w)
    torch.testing.assert_close(method.bias, b)
    torch.testing.assert_close(method.alpha, alpha)
    torch.testing.assert_close(method.logits(pixels), features @ w.T + b + alpha * (features @ texts.T))


def test_lp_plus_plus_on_a_part_of_the_images_is_as_sure_as_on_all() -> None:
    """A threshold is read from trainings on parts; with half of twice the same images they are the same."""
    generator = torch.Generator().manual_seed(0)
    features = F.normalize(torch.randn(12, 8, generator=generator), dim=-1)
    texts = F.normalize(torch.randn(3, 8, generator=generator), dim=-1)
    labels = torch.arange(12) % 3
    twice = fit_lp(features.repeat(2, 1), (features @ texts.T).repeat(2, 1), labels.repeat(2), 40)
    alone = fit_lp(features, features @ texts.T, labels, 40)
    counted = fit_lp(features, features @ texts.T, labels, 40, images=8)
    assert float((alone[0] - twice[0]).abs().max()) > 0.1
    for once, again in zip(counted, twice, strict=True):
        torch.testing.assert_close(once, again, rtol=1e-4, atol=1e-4)
    method = prepared("lp-plus-plus", steps=5, views=0)
    assert method.settled_config().images == len(LABELS) / len(NAMES)


def test_lp_plus_plus_before_it_is_fitted_is_zero_shot() -> None:
    method, pixels = build("lp-plus-plus"), images(3)
    torch.testing.assert_close(method.logits(pixels), ZeroShot(method.clip, NAMES).logits(pixels))


# -- ProKeR -------------------------------------------------------------------------------------------


def test_proker_minimizes_its_objective() -> None:
    """In numpy: the answer at new images, and no other coefficients give a smaller objective."""
    method, pixels = prepared("proker", views=0, beta=2.0, ridge=0.3), images(3, seed=8)
    s = F.normalize(method.clip.encode_image(images(6)), dim=-1).numpy()
    x = F.normalize(method.clip.encode_image(pixels), dim=-1).numpy()
    t = method.prompts.frozen.numpy()
    y = np.eye(len(NAMES))[LABELS.numpy()]

    def kernel(a, b):
        return np.array([[math.exp(-2.0 * (1 - float(p @ q))) for q in b] for p in a])

    inner = kernel(s, s)
    solved = np.linalg.inv(inner + 0.3 * np.eye(len(s))) @ (y - s @ t.T)
    expected = method.clip.logit_scale * (x @ t.T + kernel(x, s) @ solved)
    np.testing.assert_allclose(method.logits(pixels).numpy(), expected, rtol=1e-8)

    def objective(c):
        return ((s @ t.T + inner @ c - y) ** 2).sum() + 0.3 * np.trace(c.T @ inner @ c)

    rng = np.random.default_rng(0)
    coefficients = method.coefficients.numpy()
    least = objective(coefficients)
    assert all(
        objective(coefficients + 1e-3 * rng.normal(size=coefficients.shape)) > least for _ in range(20)
    )


def test_proker_with_a_large_ridge_is_zero_shot() -> None:
    method, pixels = prepared("proker", ridge=1e9), images(3)
    torch.testing.assert_close(
        method.logits(pixels), ZeroShot(method.clip, NAMES).logits(pixels), rtol=1e-6, atol=1e-6
    )
