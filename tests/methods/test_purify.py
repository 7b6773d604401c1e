"""Head purification against separate passes and loops; folding; the ablations."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tiny import Colors, images, tiny_clip

from dear.clip import Record
from dear.errors import UsageError
from dear.methods import Purify, ZeroShot
from dear.methods.purify import FACTORS, kernels, mmd
from dear.report.head_figures import gates_figure
from dear.runs.folder import load_run
from dear.runs.recipe import Recipe
from dear.train.run import train

NAMES = ("red", "green", "blue")
LABELS = torch.tensor([0, 2, 1, 2, 0, 1, 1])
DOMAINS = torch.tensor([3, 0, 0, 3, 5, 5, 5])


def build(dtype: torch.dtype = torch.float64, head_dropout: float = 0.0, **options) -> Purify:
    method = Purify(tiny_clip(dtype=dtype), NAMES, head_dropout=head_dropout, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return method


def literal_mmd(x: torch.Tensor, domains: torch.Tensor, widths: list[float]) -> torch.Tensor:
    """x [n, D]; k = mean of exp(-|a - b|^2 / width); the mean over pairs of domains, one kernel at a time."""

    def k(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return sum(torch.exp(-((a - b) ** 2).sum() / w) for w in widths) / len(widths)

    groups = [x[domains == d] for d in domains.unique()]
    gaps = []
    for i, one in enumerate(groups):
        for two in groups[i + 1 :]:
            same = sum(k(a, b) for a in one for b in one) / len(one) ** 2
            same = same + sum(k(a, b) for a in two for b in two) / len(two) ** 2
            gaps.append(same - 2 * sum(k(a, b) for a in one for b in two) / (len(one) * len(two)))
    return sum(gaps) / len(gaps)


def median_widths(x: torch.Tensor) -> list[float]:
    squared = sorted(
        float(((x[i] - x[j]) ** 2).sum()) for i in range(len(x)) for j in range(len(x)) if i != j
    )
    return [factor * squared[(len(squared) - 1) // 2] for factor in FACTORS]


@pytest.mark.parametrize("bandwidths", [None, (0.5, 3.0)])
def test_mmd_equals_the_loops(bandwidths: tuple[float, ...] | None) -> None:
    x = images(7)[:, :2].flatten(2)[:, :, :9]  # [7, 2, 9]
    expected = []
    for layer in range(2):
        widths = median_widths(x[:, layer]) if bandwidths is None else [2 * s * s for s in bandwidths]
        expected.append(literal_mmd(x[:, layer], DOMAINS, widths))
    torch.testing.assert_close(mmd(x, DOMAINS, bandwidths), sum(expected) / 2)


def test_mmd_of_one_domain_is_zero_and_of_apart_domains_large() -> None:
    x = images(6).flatten(2)[:, :1]
    assert float(mmd(x, torch.zeros(6, dtype=torch.long))) == 0
    halves = torch.tensor([0, 0, 0, 1, 1, 1])
    shifted = x + 5 * halves[:, None, None]
    assert float(mmd(shifted, halves)) > float(mmd(x, halves)) > 0
    same = kernels(torch.zeros(1, 4, 3))
    assert torch.isfinite(same).all()  # all features alike: the median distance is zero


def separate_passes(method: Purify, pixels: torch.Tensor, bandwidths: tuple[float, ...] | None):
    """CE with everything attached; the MMD from a second pass whose LoRA pairs are detached."""
    clip, texts = method.clip, method.prompts.frozen
    images = clip.visual(pixels, method.edit())
    ce = F.cross_entropy(clip.logit_scale * F.normalize(images, dim=-1) @ texts.T, LABELS)
    pairs = dict(method.pairs.items())
    for name, p in pairs.items():
        method.pairs[name] = torch.nn.Parameter(p.detach(), requires_grad=False)
    record = Record()
    clip.visual(pixels, method.edit(), record)
    for name, p in pairs.items():
        method.pairs[name] = p
    gaps = []
    for layer in range(1, clip.config.vision.layers + 1):
        x = record[f"blocks.{layer}.out"][:, 0]
        widths = median_widths(x.detach()) if bandwidths is None else [2 * s * s for s in bandwidths]
        gaps.append(literal_mmd(x, DOMAINS, widths))
    return ce, sum(gaps) / len(gaps)


@pytest.mark.parametrize("bandwidths", [None, (2.0, 6.0)])
def test_mmd_reaches_the_gates_only(bandwidths: tuple[float, ...] | None) -> None:
    method, pixels = build(bandwidths=bandwidths, weight=3.0), images(7)
    ce, gap = separate_passes(method, pixels, bandwidths)
    (ce + 3.0 * gap).backward()
    expected = {name: p.grad.clone() for name, p in method.named_parameters()}
    method.zero_grad()
    (lora_alone,) = torch.autograd.grad(separate_passes(method, pixels, bandwidths)[0], method.pairs["q3_up"])
    loss = method.loss(pixels, LABELS, DOMAINS)
    loss.total.backward()
    torch.testing.assert_close(loss.total, ce + 3.0 * gap)
    torch.testing.assert_close(loss.parts["mmd"], gap.detach())
    for name, p in method.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-6, atol=1e-10, msg=name)
    torch.testing.assert_close(method.pairs["q3_up"].grad, lora_alone)


def test_mmd_to_all_and_to_nobody() -> None:
    pixels = images(7)
    grads = {}
    for to, weight in (("gates", 1.0), ("all", 1.0), ("gates", 0.0)):
        method = build(mmd_to=to, weight=weight)
        method.loss(pixels, LABELS, DOMAINS).total.backward()
        grads[to, weight] = (method.pairs["v2_up"].grad, method.scalars.grad)
    torch.testing.assert_close(grads["gates", 1.0][0], grads["gates", 0.0][0])
    assert not torch.allclose(grads["all", 1.0][0], grads["gates", 1.0][0])
    torch.testing.assert_close(grads["all", 1.0][1], grads["gates", 1.0][1])
    assert not torch.allclose(grads["gates", 0.0][1], grads["gates", 1.0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mmd_of_equal_images_has_a_finite_gradient(dtype: torch.dtype) -> None:
    """As in a training step that drops every head of the first layer."""
    x = torch.randn(2, 5, dtype=dtype).expand(7, 2, 5).clone().requires_grad_()
    mmd(x, DOMAINS).backward()
    assert bool(x.grad.isfinite().all())
    assert float(x.grad.abs().max()) < 1


@pytest.mark.parametrize("gates", [True, False])
def test_head_dropout_removes_heads_in_training_alone(gates: bool) -> None:
    method, pixels = build(head_dropout=0.25, gates=gates), images(7)
    torch.manual_seed(0)
    draws = [torch.stack([layer.gate for layer in method.edit(0.25).layers.values()]) for _ in range(400)]
    factors = torch.stack(draws).detach() / method.gates().detach()  # [400, L, H]
    near_zero_or_scaled = (factors == 0) | ((factors - 1 / 0.75).abs() < 1e-9)
    assert bool(near_zero_or_scaled.all())
    assert abs(float((factors == 0).double().mean()) - 0.25) < 0.02
    assert not torch.equal(method.loss(pixels, LABELS).total, method.loss(pixels, LABELS).total)
    plain = build(gates=gates)
    assert torch.equal(method.logits(pixels), plain.logits(pixels))
    assert torch.equal(method.merge().encode_image(pixels), plain.merge().encode_image(pixels))


def test_gates_are_a_softmax_times_the_heads() -> None:
    method = build()
    s, gates = method.scalars.detach(), method.gates().detach()
    for layer in range(len(s)):
        total = sum(math.exp(float(v)) for v in s[layer])
        for head in range(4):
            assert abs(float(gates[layer, head]) - 4 * math.exp(float(s[layer, head])) / total) < 1e-12
    hard = method.gates(top=3)
    assert torch.equal(hard.sum(1), torch.full((6,), 3.0).double())
    assert all(hard[layer, int(s[layer].argmin())] == 0 for layer in range(6))
    assert torch.equal(method.gates(top=4), torch.ones_like(s))
    with pytest.raises(UsageError, match=r"top.*9"):
        method.gates(top=9)


def test_ranks_and_pairs_a_head() -> None:
    method = build()
    for layer in range(1, 7):
        rank = 8 if layer >= 5 else 2
        assert method.pairs[f"q{layer}_down"].shape == (4, rank, 36)
        assert method.pairs[f"v{layer}_up"].shape == (4, 9, rank)
    shared = build(lora="shared")
    assert shared.pairs["q1_down"].shape == (1, 2, 36)
    assert build(lora="none").trainable_parameters == 24
    assert "scalars" not in build(gates=False).adapter_state()


@pytest.mark.parametrize("options", [{}, {"lora": "shared"}, {"lora": "none"}, {"gates": False}], ids=str)
def test_merged_is_a_plain_clip_with_the_same_answers(options: dict) -> None:
    method, pixels = build(torch.float32, **options), images(5, dtype=torch.float32)
    plain = method.merge()
    own = method.logits(pixels)
    torch.testing.assert_close(ZeroShot(plain, NAMES).logits(pixels), own, rtol=0, atol=1e-4)
    assert not torch.allclose(ZeroShot(method.clip, NAMES).logits(pixels), own, atol=1e-2)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in method.clip.parameters())
    assert len(list(plain.modules())) == len(list(method.clip.modules()))


def test_a_run_keeps_the_gates_of_every_epoch(tmp_path) -> None:
    method = Purify(tiny_clip(dtype=torch.float32), NAMES)
    data = Colors(domains=2)
    train(method, data, Recipe(epochs=3, batch=6, lr=1e-2), tmp_path / "run")
    assert method.history.shape == (3, 6, 4)
    torch.testing.assert_close(method.history[-1], method.gates().detach())
    assert not torch.allclose(method.history[0], method.history[-1])
    loaded = load_run(tmp_path / "run", tiny_clip(dtype=torch.float32))
    assert torch.equal(loaded.history, method.history)
    figure = gates_figure(loaded.history)
    assert len(figure.frames) == 4  # the start, and after each epoch
    torch.testing.assert_close(
        torch.tensor(figure.frames[-1].data[0].z), method.history[-1].double(), check_dtype=False
    )
    assert "gates" in method.learned_values()
