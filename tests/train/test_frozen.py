"""The frozen part of several steps at once, and the two parts of a loss."""

from __future__ import annotations

import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip, token_ids

from dear.methods import DeAR
from dear.train.feed import Feed
from dear.train.frozen import FrozenAhead
from dear.train.recipe import Recipe


def task(batch: int = 5) -> tuple[DeAR, Feed]:
    clip = tiny_clip(dtype=torch.float32)
    method = DeAR(clip, ("red", "green", "blue"), roles=mixed_roles(), ids=token_ids())
    return method, Feed(Colors(), clip, Recipe(batch=batch))


def test_a_span_of_steps_has_the_views_of_each_step() -> None:
    _, feed = task()
    batch, counts = feed.span(1, 5)  # 12 images in batches of 5: the third batch of an epoch is smaller
    assert counts == [5, 2, 5, 5]
    for step, pixels, labels in zip(
        range(1, 5), batch.pixels.split(counts), batch.labels.split(counts), strict=True
    ):
        alone = feed.at(step)
        torch.testing.assert_close(pixels, alone.pixels, rtol=0, atol=1e-5)
        assert torch.equal(labels, alone.labels)


def test_a_step_from_what_was_computed_ahead_has_the_same_loss_and_gradients() -> None:
    method, feed = task()
    ahead = FrozenAhead(method, feed, steps=6)
    for step in (0, 2, 4, 5):
        results = []
        for given in (True, False):
            method.zero_grad()
            loss = method.loss_from_frozen(*ahead.at(step)) if given else method.loss(*feed.at(step))
            loss.total.backward()
            results.append([loss.total.detach(), *(p.grad.clone() for p in method.parameters())])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_groups_of_steps_do_not_depend_on_where_a_run_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dear.train.frozen.IMAGES_AT_ONCE", 10)
    method, feed = task()
    asked: list[tuple[int, int]] = []
    span = feed.span
    monkeypatch.setattr(feed, "span", lambda first, last: asked.append((first, last)) or span(first, last))
    whole = FrozenAhead(method, feed, steps=5)
    first = [whole.at(step) for step in range(5)]
    assert asked == [(0, 2), (2, 4), (4, 5)]
    resumed = FrozenAhead(method, feed, steps=5).at(3)
    assert all(torch.equal(a, b) for a, b in zip(resumed.frozen, first[3].frozen, strict=True))


def test_nothing_ahead_but_the_prefix_without_regularization() -> None:
    method, feed = task()
    assert len(method.frozen_stage(feed.at(0).pixels)) == 2
    plain = DeAR(method.clip, method.classes, roles=mixed_roles(), ids=token_ids(), lambda_reg=0.0)
    assert len(plain.frozen_stage(feed.at(0).pixels)) == 1
