"""Unlabeled images on frozen features, compared with plain loops and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dear.errors import InputError
from dear.unlabeled import (
    UNLABELED,
    Comparison,
    LearningCurve,
    choose_graph,
    choose_next,
    choose_typical,
    classes_without_labels,
    compare_with_labeled_only,
    fit_probe,
    fit_semi_supervised_probe,
    forecast_gain,
    judge_pool,
    learning_curve,
    measure_nearness,
    nearest_neighbors,
    neighbor_graph,
    propagate_labels,
    select_pseudo_labels,
)
from dear.unlabeled import graph as graph_module
from dear.unlabeled.forecast import wilson_interval
from dear.unlabeled.graph import largest_in_rows
from dear.unlabeled.pool import MAX_FOREIGN_SHARE, MIN_CONFIDENCE, duplicate_groups, label_folds
from dear.unlabeled.probe import balance_and_sharpen, pool_weights


def clouds(
    classes: int = 3, images: int = 30, width: int = 8, spread: float = 0.35, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Unit features [classes · images, width] around one center per class, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    centers = F.normalize(torch.randn(classes, width, generator=generator), dim=1)
    truth = torch.arange(classes).repeat(images)
    noise = spread * torch.randn(len(truth), width, generator=generator)
    return F.normalize(centers[truth] + noise, dim=1), truth


def hide(truth: Tensor, per_class: int) -> Tensor:
    """The truth with all but the first labels of each class hidden."""
    labels = torch.full_like(truth, UNLABELED)
    for label in truth.unique():
        rows = (truth == label).nonzero()[:per_class, 0]
        labels[rows] = truth[rows]
    return labels


@pytest.mark.parametrize("block", [1, 64, 2**25])
def test_nearest_neighbors_are_scikit_learns_for_any_block(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sklearn.neighbors import NearestNeighbors

    monkeypatch.setattr(graph_module, "_BLOCK_NUMBERS", block)
    features, _ = clouds()
    cosines, rows = nearest_neighbors(features, features, 4, torch.arange(len(features)))
    reference = NearestNeighbors(n_neighbors=5, metric="cosine").fit(features.numpy())
    distances, indices = reference.kneighbors(features.numpy())
    assert np.array_equal(rows.numpy(), indices[:, 1:])
    np.testing.assert_allclose(1 - cosines.numpy(), distances[:, 1:], atol=1e-5)


@pytest.mark.parametrize("columns", [3, 640, 1000, 1037])
def test_largest_in_rows_is_topk(columns: int) -> None:
    values = torch.rand(20, columns, generator=torch.Generator().manual_seed(0))
    values[3] = 1.0  # ties
    largest, columns_of = largest_in_rows(values, 3)
    assert torch.equal(largest, values.topk(3, dim=1).values)
    assert torch.equal(values.gather(1, columns_of), largest)
    assert all(len(set(row)) == 3 for row in columns_of.tolist())


def test_the_graph_is_the_plain_loops() -> None:
    features, _ = clouds(images=5)
    count = len(features)
    dense = torch.zeros(count, count)
    for row in range(count):
        cosines = features[row] @ features.T
        cosines[row] = -2
        for column in cosines.topk(3).indices.tolist():
            weight = math.exp(8 * float(features[row] @ features[column]))
            dense[row, column] += weight / 2
            dense[column, row] += weight / 2
    dense = dense / dense.sum(dim=1, keepdim=True)
    torch.testing.assert_close(neighbor_graph(features, 3).to_dense(), dense, rtol=1e-4, atol=1e-6)


def test_propagation_is_the_plain_loops_and_keeps_fixed_and_isolated_rows() -> None:
    features, _ = clouds(images=4)
    graph = neighbor_graph(features, 2).to_dense()
    graph[5] = 0  # an image without neighbors
    start = torch.rand(len(features), 3, generator=torch.Generator().manual_seed(1))
    fixed = torch.arange(len(features)) < 3
    expected = start.clone()
    for _ in range(3):
        previous = expected.clone()
        for row in range(len(features)):
            if row >= 3 and row != 5:
                expected[row] = 0.5 * previous[row] + 0.5 * sum(
                    graph[row, column] * previous[column] for column in range(len(features))
                )
    result = propagate_labels(graph.to_sparse(), start, fixed, steps=3)
    torch.testing.assert_close(result, expected)


def test_the_probe_is_scikit_learns_logistic_regression() -> None:
    from sklearn.linear_model import LogisticRegression

    features, truth = clouds(spread=0.6)
    ridge, mean = 0.01, features.mean(dim=0)
    probe = fit_probe(features, F.one_hot(truth).float(), torch.zeros(3, 8), mean, ridge)
    inputs = 10 * F.normalize(features - mean, dim=1)
    strength = 1 / (2 * ridge * len(truth))
    reference = LogisticRegression(C=strength, tol=1e-8, max_iter=5000).fit(inputs.numpy(), truth.numpy())
    np.testing.assert_allclose(
        probe.logits(features).softmax(dim=1).numpy(), reference.predict_proba(inputs.numpy()), atol=2e-3
    )


def test_weights_of_images_count_like_copies() -> None:
    features, truth = clouds(images=6, spread=0.6)
    targets, mean, texts = F.one_hot(truth).float(), features.mean(dim=0), torch.zeros(3, 8)
    weights = torch.ones(len(truth))
    weights[:2] = 3
    rows = torch.cat([torch.arange(len(truth)), torch.tensor([0, 0, 1, 1])])
    weighted = fit_probe(features, targets, texts, mean, 0.01, weights)
    copied = fit_probe(features[rows], targets[rows], texts, mean, 0.01)
    torch.testing.assert_close(weighted.logits(features), copied.logits(features), atol=2e-2, rtol=1e-2)


def test_balancing_raises_rare_classes_and_rows_sum_to_one() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.55, 0.45]])
    result = balance_and_sharpen(probabilities)
    torch.testing.assert_close(result.sum(dim=1), torch.ones(3))
    assert result[2].argmax() == 1
    means = probabilities.mean(dim=0)
    expected = (probabilities[0] / means.sqrt()) ** 1.5
    torch.testing.assert_close(result[0], expected / expected.sum())


def test_unlabeled_images_help_where_classes_are_clouds() -> None:
    features, truth = clouds(classes=5, images=60, width=16, spread=0.3)
    fit = fit_semi_supervised_probe(features, hide(truth, 1), torch.zeros(5, 16))
    new, answer = clouds(classes=5, images=200, width=16, spread=0.3)
    only, both = (
        float((probe.logits(new).argmax(dim=1) == answer).float().mean())
        for probe in (fit.labeled_only, fit.probe)
    )
    assert both > only + 0.02


def test_without_unlabeled_images_the_fit_is_the_labeled_only_one() -> None:
    features, truth = clouds()
    fit = fit_semi_supervised_probe(features, truth, torch.zeros(3, 8))
    assert fit.probe is fit.labeled_only
    assert torch.equal(fit.probabilities, F.one_hot(truth).float())


def test_labeled_images_keep_their_labels_and_probabilities_sum_to_one() -> None:
    features, truth = clouds()
    labels = hide(truth, 2)
    probabilities = fit_semi_supervised_probe(features, labels, torch.zeros(3, 8)).probabilities
    labeled = labels != UNLABELED
    assert torch.equal(probabilities[labeled], F.one_hot(labels[labeled], 3).float())
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(len(labels)))


def test_a_nuisance_that_dominates_the_feature_selects_the_space_of_the_texts() -> None:
    generator = torch.Generator().manual_seed(0)
    truth, nuisance = torch.arange(2).repeat(60), torch.randint(6, (120,), generator=generator)
    parts = [0.5 * F.one_hot(truth, 2), 2.0 * F.one_hot(nuisance, 6)]
    features = torch.cat(parts, dim=1) + 0.05 * torch.randn(120, 8, generator=generator)
    features, texts = F.normalize(features, dim=1), torch.eye(8)[:2]
    labels = torch.where(torch.arange(120) < 12, truth, UNLABELED)
    mean = features.mean(dim=0)
    assert choose_graph(features, mean, texts, truth, labels)[1] == "text"
    assert choose_graph(features, mean, texts, nuisance, labels)[1] == "image"


def test_neighbors_of_other_classes_do_not_spoil_the_answers() -> None:
    """Few images of many classes in a noisy feature: good texts, but most neighbors are of other classes."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(40, 256, generator=generator)
    truth = torch.randint(40, (300,), generator=generator)
    features = F.normalize(centers[truth] + 4 * torch.randn(300, 256, generator=generator), dim=1)
    texts = 50 * F.normalize(centers + torch.randn(40, 256, generator=generator), dim=1)
    labels = torch.where(torch.arange(300) < 120, truth, UNLABELED)
    fit = fit_semi_supervised_probe(features, labels, texts)
    pool = labels == UNLABELED
    only, both = (
        float((probe.logits(features[pool]).argmax(dim=1) == truth[pool]).float().mean())
        for probe in (fit.labeled_only, fit.probe)
    )
    assert both > only - 0.02  # 0.42 and 0.65 where answers propagate along these neighbors


def test_words_that_answer_the_labels_no_better_than_chance_select_the_image_space() -> None:
    """A probe fitted to few labels may follow wrong words, and then agrees with neighbors in their span."""
    generator = torch.Generator().manual_seed(0)
    truth, misleading = torch.arange(2).repeat(60), torch.randint(2, (120,), generator=generator)
    parts = [
        F.one_hot(misleading, 2),
        2.0 * F.one_hot(truth, 2),
        0.7 * torch.randn(120, 6, generator=generator),
    ]
    features, texts = F.normalize(torch.cat(parts, dim=1), dim=1), torch.eye(10)[:2]
    mean, few = features.mean(dim=0), torch.arange(120) < 12
    for labels, space in ((truth, "image"), (misleading, "text")):
        known = torch.where(few, labels, UNLABELED)
        assert choose_graph(features, mean, texts, misleading, known)[1] == space


@pytest.mark.parametrize(
    ("labels", "message"),
    [([-2, 0], "-2"), ([0, 3], "3"), ([0], r"\[1\]"), ([-1, -1], "labels|labeled")],
)
def test_labels_that_do_not_fit_are_refused(labels: list[int], message: str) -> None:
    features = F.normalize(torch.rand(2, 4), dim=1)
    with pytest.raises(InputError, match=message):
        fit_semi_supervised_probe(features, torch.tensor(labels), torch.zeros(3, 4))


def test_classes_without_labels_are_named() -> None:
    assert classes_without_labels(torch.tensor([1, -1]), ["ant", "bee"]) == ("ant",)


def test_nearness_is_the_mean_of_the_nearest_cosines() -> None:
    labeled, _ = clouds(images=10)
    pool, _ = clouds(images=4, seed=3)
    near = measure_nearness(pool, labeled)
    for row in range(len(pool)):
        cosines = sorted((float(pool[row] @ other) for other in labeled), reverse=True)
        assert float(near.values[row]) == pytest.approx(sum(cosines[:5]) / 5, abs=1e-5)


def test_images_of_another_kind_are_foreign() -> None:
    features, truth = clouds(images=40, spread=0.2)
    other = -F.normalize(features.sum(dim=0) + 0.1 * torch.randn(120, 8), dim=1)
    labeled = hide(truth, 4) != UNLABELED
    near = measure_nearness(torch.cat([features[~labeled], other]), features[labeled])
    assert bool(near.foreign[-120:].all())
    assert float(near.foreign[:-120].float().mean()) < 0.3
    assert measure_nearness(other, features).share > MAX_FOREIGN_SHARE


def test_one_label_per_class_cannot_be_held_out() -> None:
    features, truth = clouds()
    assert compare_with_labeled_only(features, hide(truth, 1), torch.zeros(3, 8)).images == 0


def test_unlabeled_images_of_a_class_weigh_at_most_half_its_labels() -> None:
    probabilities = F.normalize(torch.rand(50, 3, generator=torch.Generator().manual_seed(1)), p=1, dim=1)
    probabilities[:40, 0] += 20  # a frequent class
    probabilities = F.normalize(probabilities, p=1, dim=1)
    weights = pool_weights(probabilities, torch.tensor([4, 2, 0]))
    for row in range(50):
        expected = sum(
            float(probabilities[row, label]) * most / float(probabilities[:, label].sum())
            for label, most in enumerate((2.0, 1.0, 0.5))  # the last counts as if it had one label
        )
        assert float(weights[row]) == pytest.approx(expected, rel=1e-4)
    assert float(weights.sum()) == pytest.approx(3.5, rel=1e-4)


def test_an_unbalanced_pool_does_not_cost_accuracy() -> None:
    changes = []
    for seed in range(6):
        features, truth = clouds(classes=6, images=60, spread=0.5, seed=seed)
        labels = hide(truth, 4)
        keep = labels != UNLABELED
        for label, count in enumerate((56, 30, 14, 7, 4, 2)):
            keep[((truth == label) & (labels == UNLABELED)).nonzero()[:count, 0]] = True
        fit = fit_semi_supervised_probe(features[keep], labels[keep], torch.zeros(6, 8))
        only = fit_semi_supervised_probe(
            features[keep & (labels != UNLABELED)], labels[labels != UNLABELED], torch.zeros(6, 8)
        )
        test, answers = features[~keep], truth[~keep]
        # each class counts the same
        after, before = (
            torch.stack(
                [
                    (probe.logits(test).argmax(dim=1) == answers)[answers == label].float().mean()
                    for label in range(1, 6)
                ]
            ).mean()
            for probe in (fit.probe, only.probe)
        )
        changes.append(float(after - before))
    assert sum(changes) / len(changes) > -0.01


def test_cross_validation_holds_every_image_out_once() -> None:
    features, truth = clouds(spread=0.5)
    comparison = compare_with_labeled_only(features, hide(truth, 6), torch.zeros(3, 8))
    assert comparison.images == 18
    assert comparison.with_pool - comparison.labeled_only == comparison.gained - comparison.lost


@pytest.mark.parametrize(
    ("comparison", "reason"),
    [
        (Comparison(40, 30, 20, 2, 12), "no gain"),
        (Comparison(40, 30, 29, 1, 2), "no gain"),
        (Comparison(40, 30, 30, 1, 1), "no gain"),
        (Comparison(40, 30, 31, 1, 0), "helps"),
        (Comparison(8, 6, 6, 0, 0), "unknown"),
        (Comparison(8, 6, 3, 0, 3), "no gain"),
        (Comparison(0, 0, 0, 0, 0), "unknown"),
    ],
)
def test_a_pool_is_left_out_unless_more_held_out_images_are_answered_rightly(
    comparison: Comparison, reason: str
) -> None:
    assert judge_pool(comparison, MIN_CONFIDENCE) == reason
    uncertain = "unsure" if reason == "unknown" else reason
    assert judge_pool(comparison, MIN_CONFIDENCE - 0.01) == uncertain


def test_folds_keep_duplicates_together_and_spare_single_groups() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, UNLABELED])
    groups = torch.tensor([0, 0, 1, 2, 3, 3, 4, 5])
    folds = label_folds(labels, groups, folds=3)
    assert folds[0] == folds[1] != -1
    assert folds[4:].tolist() == [-1, -1, -1, -1]
    assert len({int(fold) for fold in folds[[0, 2, 3]]}) == 3
    two_labels = label_folds(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), folds=2)
    assert two_labels[[0, 2]].tolist() == [-1, -1]  # held out, class 1 could not be learned


def test_duplicates_are_joined_through_others() -> None:
    features, _ = clouds(images=4, spread=1.0)
    near = F.normalize(features[:1] + 0.005, dim=1)
    groups = duplicate_groups(torch.cat([features, near]), features.mean(dim=0))
    assert groups[0] == groups[-1]
    assert len(groups.unique()) == len(features)


def test_pseudo_labels_are_the_confident_half_per_class() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(50, 4, generator=generator).softmax(dim=1)
    candidates = torch.rand(50, generator=generator) < 0.8
    chosen = select_pseudo_labels(probabilities, candidates)
    expected = []
    for label in range(4):
        rows = [r for r in range(50) if candidates[r] and int(probabilities[r].argmax()) == label]
        rows.sort(key=lambda r: -float(probabilities[r].max()))
        expected += rows[: math.ceil(len(rows) / 2)]
    assert chosen.rows.tolist() == sorted(expected)
    assert torch.equal(chosen.labels, probabilities[chosen.rows].argmax(dim=1))
    with pytest.raises(InputError, match="got 0"):
        select_pseudo_labels(probabilities, candidates, 0)
    assert not len(select_pseudo_labels(probabilities, candidates & False).rows)


def test_typical_images_cover_all_clusters_in_every_prefix_of_that_size() -> None:
    features, truth = clouds(classes=6, images=20, width=16, spread=0.1)
    centered = F.normalize(features - features.mean(dim=0), dim=1)
    order = choose_typical(centered, 24, classes=6)
    assert len(set(truth[order[:6]].tolist())) == 6
    assert len(set(order.tolist())) == len(order)


def test_near_duplicates_are_chosen_once_and_excluded_images_never() -> None:
    generator = torch.Generator().manual_seed(0)
    once = F.normalize(torch.randn(12, 8, generator=generator), dim=1)
    features = once.repeat(5, 1)
    order = choose_typical(features, 60, classes=2)
    assert sorted((order % 12).tolist()) == list(range(12))
    exclude = torch.arange(60) % 12 == 3
    assert not bool((choose_typical(features, 60, classes=2, exclude=exclude) % 12 == 3).any())
    with pytest.raises(InputError, match="got 0"):
        choose_typical(features, 0)


def test_the_next_images_are_unlabeled_and_of_clusters_without_labels() -> None:
    features, truth = clouds(classes=6, images=20, width=16, spread=0.1)
    labels = torch.full_like(truth, UNLABELED)
    labels[:3] = truth[:3]  # classes 0, 1 and 2
    order = choose_next(features, 6, labels=labels, texts=torch.zeros(6, 16))
    assert bool((labels[order] == UNLABELED).all())
    assert {3, 4, 5} <= set(truth[order].tolist())
    with pytest.raises(InputError, match="texts"):
        choose_next(features, 6, labels=labels)


def test_the_first_images_cover_what_the_class_names_are_about() -> None:
    """Images differ most by a nuisance of three values, and less by their class."""
    generator = torch.Generator().manual_seed(0)
    truth, nuisance = torch.arange(4).repeat(30), torch.randint(3, (120,), generator=generator)
    axes = torch.eye(16)
    noise = 0.02 * torch.randn(120, 16, generator=generator)
    features = F.normalize(2 * axes[4 + nuisance] + 0.5 * axes[truth] + noise, dim=1)
    assert set(truth[choose_next(features, 4, texts=50 * axes[:4])].tolist()) == {0, 1, 2, 3}
    for classes in (1, 2):  # their names differ in no direction, or in one
        assert len(choose_next(features, 12, texts=50 * axes[:classes])) == 12
    labels = torch.where((torch.arange(120) < 16) & (truth < 2), truth, UNLABELED)
    assert len(choose_next(features, 8, labels=labels, texts=50 * axes[:2])) == 8


def test_the_forecast_follows_the_power_law() -> None:
    sizes = (25.0, 50.0, 100.0)
    errors = [0.4 * (size / 25) ** -0.5 for size in sizes]
    correct = torch.stack([torch.arange(10_000) >= round(10_000 * error) for error in errors])
    forecast = forecast_gain(LearningCurve(sizes, correct), labels=100, more=300)
    assert forecast.gain == pytest.approx(errors[-1] - 0.4 * 16**-0.5, abs=1e-3)
    assert forecast.gain_interval is not None
    assert forecast.gain_interval[0] <= forecast.gain <= forecast.gain_interval[1]
    flat = torch.arange(1000).expand(3, -1) >= 100
    assert forecast_gain(LearningCurve(sizes, flat), labels=100).gain == pytest.approx(0, abs=1e-9)


def test_few_held_out_images_forecast_no_gain() -> None:
    features, truth = clouds()
    curve = learning_curve(features, hide(truth, 4), torch.zeros(3, 8))
    forecast = forecast_gain(curve, labels=12)
    assert (forecast.images, forecast.gain, forecast.gain_interval) == (12, None, None)
    nothing = forecast_gain(learning_curve(features, hide(truth, 1), torch.zeros(3, 8)), labels=3)
    assert (nothing.images, nothing.accuracy_interval) == (0, (0.0, 1.0))


def test_the_learning_curve_has_three_sizes_and_every_image() -> None:
    features, truth = clouds(spread=0.5)
    curve = learning_curve(features, hide(truth, 10), torch.zeros(3, 8))
    assert curve.correct.shape == (3, 30)
    assert curve.sizes == pytest.approx((6, 12, 24))


def test_wilson_interval_is_statsmodels_formula() -> None:
    low, high = wilson_interval(30, 40)
    for end in (low, high):  # the ends solve (p - share)^2 = z^2 p (1 - p) / n
        assert (end - 0.75) ** 2 == pytest.approx(1.645**2 * end * (1 - end) / 40)
    assert Comparison(0, 0, 0, 0, 0).gain == 0
