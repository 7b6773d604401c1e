"""Folds depend on images and units alone, and every class can be trained in every turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dear.data.folds import NEVER, assign_folds, equal_rows, feature_folds
from dear.methods.logistic import choose_strength


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), min_size=1, max_size=30), st.integers(2, 5))
def test_units_stay_together_and_classes_can_be_trained(rows: list[tuple[int, int]], folds: int) -> None:
    labels, units = np.array(rows).T
    assigned = assign_folds(labels, folds, keys=list(range(len(labels))), units=units)
    for unit in np.unique(units):
        assert len(np.unique(assigned[units == unit])) == 1
    for fold in range(folds):
        assert set(labels[assigned != fold]) == set(labels)


@pytest.mark.parametrize("folds", [2, 3, 10])
def test_the_order_of_images_and_classes_does_not_matter(folds: int) -> None:
    rng = np.random.default_rng(0)
    labels, units = rng.integers(0, 5, 40), rng.integers(0, 30, 40)
    keys = rng.permutation(40).tolist()
    assigned = assign_folds(labels, folds, keys, units)
    order, names = rng.permutation(40), rng.permutation(5)
    other = assign_folds(names[labels][order], folds, [keys[place] for place in order], units[order])
    np.testing.assert_array_equal(other, assigned[order])


def test_without_copies_folds_are_even() -> None:
    labels = np.repeat(np.arange(5), 4)
    assigned = assign_folds(labels, 10, keys=range(20))
    assert np.bincount(assigned).tolist() == [2] * 10
    assert assign_folds([0, 0, 1], 2, keys="abc").tolist()[2] == NEVER


def test_equal_features_are_copies() -> None:
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    rows = torch.cat([rows, 2 * rows[:4]])
    assert equal_rows(rows).tolist() == [*range(12), 0, 1, 2, 3]
    fold = feature_folds(rows, torch.zeros(16, dtype=torch.int64), 4)
    assert fold[:4].tolist() == fold[12:].tolist()


def test_the_strength_of_a_probe_depends_on_no_order() -> None:
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(4).repeat_interleave(6)
        centers = torch.randn(4, 16, generator=generator)
        rows = centers[labels] + 1.5 * torch.randn(24, 16, generator=generator)
        features = torch.nn.functional.normalize(rows, dim=1)
        order, names = torch.randperm(24, generator=generator), torch.tensor([3, 1, 0, 2])
        expected = choose_strength(features, labels, 4)
        assert choose_strength(features[order], labels[order], 4) == expected
        assert choose_strength(features, names[labels], 4) == expected
