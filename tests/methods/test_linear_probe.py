"""The linear probe and its focus against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from tiny import images, tiny_clip

from dear.clip.correction import Correction
from dear.errors import UsageError
from dear.heads import decompose
from dear.methods import build_method
from dear.methods.base import Method
from dear.methods.frozen import FeatureBatch
from dear.methods.logistic import DEFAULT_STRENGTH, STRENGTHS, choose_strength, fit_logistic
from dear.serve import mixed_batch

HEADS = ((5, 0), (6, 1))


def clusters(each: int, noise: float = 1.0, classes: int = 5, width: int = 24):
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(classes).repeat_interleave(each)
    rows = torch.randn(classes, width, generator=rng)[labels]
    rows = rows + noise * torch.randn(len(labels), width, generator=rng)
    return torch.nn.functional.normalize(rows, dim=1).double(), labels


@pytest.mark.parametrize("strength", [1.0, 100.0])
def test_weights_are_those_of_scikit_learn(strength: float) -> None:
    features, labels = clusters(8)
    weight, bias = fit_logistic(features, labels, 5, strength)
    reference = LogisticRegression(C=strength, max_iter=5000, tol=1e-9).fit(features.numpy(), labels.numpy())
    np.testing.assert_allclose(weight.numpy(), reference.coef_, atol=1e-4 * strength**0.5)
    scores = (features @ weight.T + bias).softmax(dim=1).numpy()
    np.testing.assert_allclose(scores, reference.predict_proba(features.numpy()), atol=1e-4)


def test_the_order_of_images_and_classes_does_not_matter_in_float32() -> None:
    features, labels = clusters(8, noise=2.0)
    features, order, classes = features.float(), torch.randperm(40), torch.randperm(5)
    others = clusters(20, noise=3.0)[0].float()
    weight, bias = fit_logistic(features, labels, 5, 1000.0)
    first = (others @ weight.T + bias).softmax(dim=1)
    weight, bias = fit_logistic(features[order], classes[labels[order]], 5, 1000.0)
    second = (others @ weight.T + bias).softmax(dim=1)[:, classes]
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)


def test_the_penalty_follows_the_images() -> None:
    assert choose_strength(*clusters(20, noise=6.0), 5) == min(STRENGTHS)
    faint, labels = clusters(20, noise=0.1)
    loud = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(1)).double()
    assert choose_strength(torch.cat([0.05 * faint, loud], dim=1), labels, 5) == max(STRENGTHS)
    assert choose_strength(*clusters(1), 5) == DEFAULT_STRENGTH


def features_batch(method: Method, pixels: torch.Tensor, labels: torch.Tensor) -> FeatureBatch:
    stage = method.inference_stage(pixels)
    return FeatureBatch(stage.x, labels, focus=stage.focus)


def test_a_focused_probe_is_a_logistic_regression_on_the_focused_feature() -> None:
    clip = tiny_clip(dtype=torch.float64)
    pixels, labels = images(9, dtype=torch.float64), torch.arange(9) % 3
    probe = build_method("linear-probe", clip, ("a", "b", "c"), focus=HEADS, focus_weight=2.0, C=10.0)
    probe.prepare(lambda augment: iter([features_batch(probe, pixels, labels)]))

    parts = decompose(clip, pixels)
    terms = sum(parts.heads[:, layer - 1, head] for layer, head in HEADS)
    unit = [
        (rows - rows.mean(0)) / (rows - rows.mean(0)).norm(dim=1, keepdim=True)
        for rows in (parts.total().double(), terms.double())
    ]
    expected = (torch.cat([unit[0], 2 * unit[1]], dim=1) / 5**0.5).numpy()
    reference = LogisticRegression(C=10.0, max_iter=5000, tol=1e-9).fit(expected, labels.numpy())
    probabilities = probe.logits(pixels).softmax(dim=1).numpy()
    np.testing.assert_allclose(probabilities, reference.predict_proba(expected), atol=1e-3)


@pytest.mark.parametrize(
    "name", ["linear-probe", "tip-adapter", "tip-adapter-f", "proker", "lp-plus-plus", "clip-adapter"]
)
def test_a_focus_changes_the_answer_and_survives_saving(name: str) -> None:
    clip = tiny_clip()
    pixels, labels = images(6, dtype=clip.dtype), torch.arange(6) % 3
    plain, focused = (
        build_method(name, clip, ("a", "b", "c"), **options) for options in ({}, {"focus": HEADS})
    )
    for method in (plain, focused):
        batch = features_batch(method, pixels, labels)
        method.prepare(lambda augment, batch=batch: iter([batch]))
    assert float((plain.logits(pixels) - focused.logits(pixels)).abs().max()) > 1e-4
    assert "reader.mean" in focused.adapter_state()
    assert "reader.mean" not in plain.adapter_state()
    again = build_method(name, clip, ("a", "b", "c"), config=focused.config)
    again.load_adapter_state(focused.adapter_state())
    assert torch.equal(again.logits(pixels), focused.logits(pixels))


def test_a_mixed_batch_answers_as_each_alone() -> None:
    clip = tiny_clip(dtype=torch.float32)
    pixels, labels = images(6, dtype=torch.float32), torch.arange(6) % 3
    width = clip.config.embed_dim
    other = clip.with_correction(Correction(torch.eye(width) * 1.5, torch.ones(width)))
    methods = [
        build_method(name, backbone, ("a", "b", "c"), focus=focus)
        for name, backbone, focus in (
            ("linear-probe", clip, HEADS),
            ("tip-adapter", clip, ()),
            ("proker", clip, HEADS[:1]),
            ("linear-probe", other, HEADS),
            ("tip-adapter", clip, HEADS),
            ("linear-probe", other, ()),
        )
    ]
    for method in methods:
        batch = features_batch(method, pixels, labels)
        method.prepare(lambda augment, batch=batch: iter([batch]))
    together = mixed_batch.logits(methods, pixels)
    for row, (method, logits) in enumerate(zip(methods, together, strict=True)):
        torch.testing.assert_close(logits, method.logits(pixels[row : row + 1])[0], atol=1e-4, rtol=1e-4)


def test_wrong_options_are_refused() -> None:
    for options, words in (
        ({"focus": [[99, 0]]}, "layer 99"),
        ({"focus_weight": 0}, "focus_weight"),
        ({"C": -1}, r"C\b.*-1"),
    ):
        with pytest.raises(UsageError, match=words):
            build_method("linear-probe", tiny_clip(), ("a", "b"), **options)
