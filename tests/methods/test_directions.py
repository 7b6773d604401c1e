"""Class directions: leave-one-out, their weight, lists with new classes, what is saved."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tiny import images, mixed_roles, tiny_clip, token_ids

from dear.methods import DeAR
from dear.methods.directions import (
    WEIGHTS,
    choose_direction_weight,
    compare_without_image,
    fit_directions,
    leave_out,
)
from dear.methods.frozen import Batch

NAMES = ["cat", "dog", "newt"]
LABELS = torch.tensor([0, 2, 1, 2, 0, 1, 1])


def trained(labels: torch.Tensor = LABELS, **options) -> DeAR:
    """On random images, one per label, with learned tensors that are no longer those of the start."""
    model = DeAR(tiny_clip(), NAMES, roles=mixed_roles(), ids=token_ids(), **options)
    model.prepare(lambda augment: iter([Batch(images(len(labels), seed=4), labels)]))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name != "log_direction_weight":
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)
    return model


def test_leaving_an_image_out_is_fitting_without_it() -> None:
    features = F.normalize(torch.randn(12, 6, generator=torch.Generator().manual_seed(1)).double(), dim=1)
    labels = torch.arange(12) % 4
    fitted = fit_directions(features, labels, 4, ridge=2.0)
    x = (features - features.mean(0)) / fitted.length
    change, moved = leave_out(x, labels, fitted.rows, fitted.inverse, fitted.shares)
    y = F.one_hot(labels, 4).double() - fitted.shares
    for i in range(12):
        others = [j for j in range(12) if j != i]
        normal = x[others].T @ x[others] + 2.0 * torch.eye(6).double()
        expected = torch.linalg.solve(normal, x[others].T @ y[others]).T
        without_image = fitted.rows - change[i][:, None] * moved[i]
        torch.testing.assert_close(without_image, expected, rtol=0, atol=1e-12)


def test_leaving_an_image_out_leaves_its_copies_out() -> None:
    features = F.normalize(torch.randn(12, 6, generator=torch.Generator().manual_seed(1)).double(), dim=1)
    labels, times = torch.arange(12) % 4, torch.tensor([3, 1, 2, 1, 1, 5, 1, 1, 2, 1, 1, 4])
    rows = torch.arange(12).repeat_interleave(times)
    repeated, labels_repeated = features[rows], labels[rows]
    fitted = fit_directions(repeated, labels_repeated, 4, ridge=2.0)
    assert fitted.shares.tolist() == [0.25] * 4, "copies must count once"
    x = (features - repeated.mean(0)) / fitted.length
    change, moved = leave_out(x, labels, fitted.rows, fitted.inverse, fitted.shares)
    y = F.one_hot(labels, 4).double() - fitted.shares
    for i in range(12):
        others = [j for j in range(12) if j != i]
        normal = x[others].T @ x[others] + 2.0 * torch.eye(6).double()
        expected = torch.linalg.solve(normal, x[others].T @ y[others]).T
        torch.testing.assert_close(fitted.rows - change[i][:, None] * moved[i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("noise", [0.0, 0.05], ids=["equal", "resaved"])
def test_copies_of_one_image_per_class_are_one_image(noise: float) -> None:
    """Units name copies whose features differ; equal features are found without them."""
    pixels, labels = images(3, seed=4), torch.tensor([0, 1, 2])
    one = DeAR(tiny_clip(), NAMES, roles=mixed_roles(), ids=token_ids())
    one.prepare(lambda augment: iter([Batch(pixels, labels)]))
    copies = pixels.repeat(4, 1, 1, 1) + noise * images(12, seed=5)
    units = torch.arange(3).repeat(4) if noise else None
    four = DeAR(tiny_clip(), NAMES, roles=mixed_roles(), ids=token_ids())
    four.prepare(lambda augment: iter([Batch(copies, labels.repeat(4), units=units)]))
    assert float(four.leaves_out) == float(one.leaves_out) == 0
    if not noise:
        assert four.learned_values()["direction_weight"] == pytest.approx(
            one.learned_values()["direction_weight"], rel=1e-6
        )
        torch.testing.assert_close(four.direction_rows, one.direction_rows, rtol=0, atol=1e-6)


def test_the_weight_starts_at_the_smallest_loss_of_refits() -> None:
    generator = torch.Generator().manual_seed(2)
    texts = F.normalize(torch.randn(4, 6, generator=generator).double(), dim=1)
    labels = torch.arange(12) % 3  # the last class has no image
    features = F.normalize(texts[labels] + torch.randn(12, 6, generator=generator).double(), dim=1)
    fitted = fit_directions(features, labels, 4, ridge=2.0)
    x, images = (features - features.mean(0)) / fitted.length, features - 0.5 * features.mean(0)
    y = F.one_hot(labels, 4).double() - fitted.shares
    losses = []
    for weight in WEIGHTS:
        scores = []
        for i in range(12):
            others = [j for j in range(12) if j != i]
            normal = x[others].T @ x[others] + 2.0 * torch.eye(6).double()
            rows = torch.linalg.solve(normal, x[others].T @ y[others]).T
            scores.append(5.0 * F.normalize(texts + weight * F.normalize(rows, dim=1), dim=1) @ images[i])
        losses.append(float(F.cross_entropy(torch.stack(scores), labels)))
    expected = WEIGHTS[losses.index(min(losses))]
    assert WEIGHTS[0] < expected < WEIGHTS[-1], "the data must have a weight between"
    assert float(choose_direction_weight(features, labels, texts, fitted, center=0.5, scale=5.0)) == float(
        expected
    )


def test_without_its_only_image_a_class_has_its_text_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    features = F.normalize(torch.randn(41, 60, generator=generator).double(), dim=1)
    labels = torch.cat([torch.arange(40) % 2, torch.tensor([2])])
    fitted = fit_directions(features, labels, 3, ridge=4.0)
    texts = F.normalize(torch.randn(3, 60, generator=generator).double(), dim=1)
    x = (features - features.mean(0)) / fitted.length
    products = compare_without_image(x, labels, texts, fitted, torch.tensor(1.0).double())(features)
    assert abs(products[-1, 2] - features[-1] @ texts[2]) < 0.2  # 0.7 with a direction of length 1


def test_a_large_ridge_points_to_the_class_means() -> None:
    features = F.normalize(torch.randn(9, 6, generator=torch.Generator().manual_seed(1)).double(), dim=1)
    labels = torch.arange(9) % 3
    rows = fit_directions(features, labels, 3, ridge=1e9).rows
    means = torch.stack([features[labels == c].mean(0) for c in range(3)]) - features.mean(0)
    torch.testing.assert_close(F.normalize(rows, dim=1), F.normalize(means, dim=1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("labels", [LABELS, torch.tensor([0, 2, 1])], ids=["several", "one-image"])
@pytest.mark.parametrize(
    "options",
    [{"direction_dropout": 0.0}, {"direction_dropout": 0.0, "center": 0.0}, {"direction_dropout": 1.0}],
    ids=["centered", "uncentered", "texts-alone"],
)
def test_the_loss_is_that_of_a_refit_per_image(labels: torch.Tensor, options: dict) -> None:
    """In plain loops: regression without the image, steps without directions, both cross-entropies."""
    model = trained(labels, **options)
    config, tau, pixels = model.config, model.clip.logit_scale, images(len(labels), seed=4)
    loss = model.loss(pixels, labels)

    features = F.normalize(model.clip.encode_image(pixels).detach(), dim=1)
    mean = features.mean(0)
    length = sum((f - mean).norm() for f in features) / len(labels)
    x = [(f - mean) / length for f in features]
    shares = [float((labels == c).double().mean()) for c in range(3)]

    def regression(numbers: list[int]) -> list[torch.Tensor]:
        normal = config.direction_ridge * torch.eye(len(mean), dtype=mean.dtype)
        sides = [torch.zeros_like(mean) for _ in range(3)]
        for i in numbers:
            normal = normal + torch.outer(x[i], x[i])
            for c in range(3):
                sides[c] = sides[c] + (float(labels[i] == c) - shares[c]) * x[i]
        return [torch.linalg.solve(normal, side) for side in sides]

    everything = regression(list(range(len(labels))))
    weight = model.learned_values()["direction_weight"] if config.direction_dropout == 0 else 0.0
    texts = model.texts().detach()
    f_cls, f_attr = (F.normalize(f, dim=-1).detach() for f in model.image_features(pixels))
    alpha = model.v.softmax(0).tolist()
    sums = {"ce": 0.0, "ce_class": 0.0}
    for i, label in enumerate(labels.tolist()):
        several = len(labels) > 3
        others = regression([j for j in range(len(labels)) if j != i]) if several else everything
        lengths = [max(r.norm(), whole.norm() / 4) for r, whole in zip(others, everything, strict=True)]
        directions = [r / length for r, length in zip(others, lengths, strict=True)]
        rows = [F.normalize(t + weight * r, dim=0) for t, r in zip(texts, directions, strict=True)]
        attributes = sum(a * f for a, f in zip(alpha[1:], f_attr[i], strict=True))
        sides = {"ce": alpha[0] * f_cls[i] + attributes, "ce_class": f_cls[i]}
        for name, side in sides.items():
            scores = [tau * float((side - config.center * mean) @ row) for row in rows]
            sums[name] += math.log(sum(math.exp(s - scores[label]) for s in scores)) / len(labels)
    for name, expected in sums.items():
        assert float(loss.parts[name]) == pytest.approx(expected, abs=1e-8)
    reg = sum(float(loss.parts[name]) for name in ("reg_image", "reg_text"))
    total = 0.7 * sums["ce"] + 0.3 * sums["ce_class"]
    total += config.lambda_fusion * -math.log(alpha[0]) + config.lambda_reg * reg
    assert float(loss.total.detach()) == pytest.approx(total, abs=1e-8)


def test_the_weight_is_learned_where_an_image_can_be_left_out() -> None:
    torch.manual_seed(7)
    several, one = trained(direction_dropout=0.0), trained(torch.tensor([0, 2, 1]), direction_dropout=0.0)
    for model, labels in ((several, LABELS), (one, torch.tensor([0, 2, 1]))):
        model.loss(images(len(labels), seed=4), labels).total.backward()
    assert abs(float(several.log_direction_weight.grad)) > 1e-6
    assert float(one.log_direction_weight.grad or 0.0) == 0.0


def test_one_image_per_class_takes_its_weight_from_what_texts_recognize() -> None:
    labels = torch.tensor([0, 2, 1])
    model = trained(labels, direction_weight=0.4)
    features = F.normalize(model.clip.encode_image(images(3, seed=4)), dim=1)
    answers = ((features - features.mean(0)) @ model.prompts.frozen.T).argmax(1)
    unknown = max(1e-3, float((answers != labels).double().mean()))
    assert model.learned_values()["direction_weight"] == pytest.approx(0.4 * unknown)


def test_trained_classes_have_directions_and_new_ones_do_not() -> None:
    model = trained()
    texts = model.texts()
    rows = F.normalize(model.direction_rows, dim=1)
    expected = F.normalize(texts + model.learned_values()["direction_weight"] * rows, dim=1)
    torch.testing.assert_close(model.class_weights(texts), expected, rtol=0, atol=1e-12)
    new = model.with_classes(["fir", "elm"], ids=token_ids((4, 2), seed=5))
    assert torch.equal(new.class_weights(new.texts()), new.texts())
    back = new.with_classes(NAMES, ids=token_ids())
    assert torch.equal(back.logits(images()), model.logits(images()))
    turned = model.with_classes(["newt", "cat"], ids=token_ids()[[2, 0]])
    torch.testing.assert_close(turned.logits(images()), model.logits(images())[:, [2, 0]], rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", ["fused", "decoupled"])
def test_a_list_of_trained_and_new_classes(mode: str) -> None:
    """Texts alone decide how likely trained classes are together, directions which of them it is."""
    model = trained()
    ids = torch.cat([token_ids()[[1]], token_ids((4,), seed=5), token_ids()[[0]]])
    both = model.with_classes(["dog", "fir", "cat"], ids=ids)
    texts = DeAR(model.clip, both.classes, roles=model.roles, ids=ids, config=model.config, trained=NAMES)
    texts.load_adapter_state({**model.adapter_state(), "direction_rows": 0 * model.direction_rows})
    scores, alone, closed = (m.logits(images(5, seed=2), mode) for m in (both, texts, model))
    torch.testing.assert_close(scores[:, 1], alone[:, 1], rtol=0, atol=1e-9)
    old = torch.tensor([0, 2])
    torch.testing.assert_close(scores[:, old].logsumexp(1), alone[:, old].logsumexp(1), rtol=0, atol=1e-9)
    torch.testing.assert_close(scores[:, 0] - scores[:, 2], closed[:, 1] - closed[:, 0], rtol=0, atol=1e-9)
    assert not torch.allclose(scores[:, old], alone[:, old])
    if mode == "fused":
        votes = both.votes(images(5, seed=2)).sum(dim=1)
        torch.testing.assert_close(votes, scores, rtol=0, atol=1e-9)


def test_a_class_without_images_keeps_its_text() -> None:
    model = trained(torch.tensor([0, 2, 0, 2, 2]))
    assert torch.equal(model.direction_rows[1], torch.zeros_like(model.direction_rows[1]))
    torch.testing.assert_close(model.class_weights(model.texts())[1], model.texts()[1], rtol=0, atol=1e-12)
    loss = model.loss(images(5, seed=4), torch.tensor([0, 2, 0, 2, 2])).total
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_a_finished_adapter_does_not_hold_what_training_alone_reads() -> None:
    model = trained()
    expected = model.logits(images())
    model.finish()
    state = model.adapter_state()
    assert state["direction_inverse"].numel() == 0
    again = model.untrained_copy()
    again.load_adapter_state(state)
    assert torch.equal(again.logits(images()), expected)
    assert torch.equal(again.with_classes(NAMES, ids=token_ids()).logits(images()), expected)
