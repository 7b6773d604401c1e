"""The frozen stage of several steps at once, or of a fixed number of views, computed once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip, token_ids

from dear.methods import DeAR, Method, build_method
from dear.runs.recipe import Recipe
from dear.train.feed import Feed
from dear.train.frozen import FrozenViews, StepFeed
from dear.train.run import Paused, train


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
    ahead = StepFeed(method, feed, steps=6, ahead=True)
    for step in (0, 2, 4, 5):
        results = []
        for given in (True, False):
            method.zero_grad()
            loss = method.loss_from_frozen(*ahead.at(step)) if given else method.loss(*feed.at(step)[:3])
            loss.total.backward()
            results.append([loss.total.detach(), *(p.grad.clone() for p in method.parameters())])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_groups_of_steps_do_not_depend_on_where_a_run_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dear.train.frozen.IMAGES_AT_ONCE", 10)
    method, feed = task()
    spans: list[tuple[int, int]] = []
    span = feed.span
    monkeypatch.setattr(feed, "span", lambda first, last: spans.append((first, last)) or span(first, last))
    ahead = StepFeed(method, feed, steps=5, ahead=True)
    first = [ahead.at(step) for step in range(5)]
    assert spans == [(0, 2), (2, 4), (4, 5)]
    resumed = StepFeed(method, feed, steps=5, ahead=True).at(3)
    for one, other in zip(resumed.frozen, first[3].frozen, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_nothing_ahead_but_the_prefix_without_regularization() -> None:
    method, feed = task()  # with a class token at layer J
    assert method.frozen_stage(feed.at(0).pixels).feature is not None
    plain = DeAR(
        method.clip, method.classes, roles=mixed_roles(), ids=token_ids(), lambda_reg=0.0, directions="none"
    )
    assert plain.frozen_stage(feed.at(0).pixels).feature is None


def views_task(views: int = 2, **limits: int) -> tuple[DeAR, Feed, StepFeed]:
    clip = tiny_clip(dtype=torch.float32)
    method = DeAR(clip, ("red", "green", "blue"), roles=mixed_roles(), ids=token_ids())
    images, recipe = Colors(domains=2), Recipe(batch=5, views=views)
    feed = Feed(images, clip, recipe)
    return method, feed, StepFeed(method, feed, 100, FrozenViews(method, images, recipe, **limits))


def test_fixed_views_are_the_views_of_their_images() -> None:
    method, feed, steps = views_task()
    for step in (0, 2, 4, 7):  # three steps per epoch
        rows, view = feed.indices(step), step // 3 % 2
        inputs, batch = steps.at(step), feed.views(rows, view)
        assert torch.equal(inputs.labels, batch.labels)
        assert torch.equal(inputs.domains, batch.domains)
        for one, other in zip(inputs.frozen, method.frozen_stage(batch.pixels), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        alone = feed.views(rows[1:2], view)  # a view depends on its image alone
        torch.testing.assert_close(alone.pixels[0], batch.pixels[1], rtol=0, atol=1e-5)
    first, second = feed.views([3], 0).pixels, feed.views([3], 1).pixels
    assert not torch.equal(first, second)


def test_every_view_passes_the_frozen_backbone_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two trainings on parts of the set share the views."""
    _, feed, steps = views_task()
    views, counts = steps.views, []
    stage = views.method.frozen_stage
    monkeypatch.setattr(views.method, "frozen_stage", lambda x: counts.append(len(x)) or stage(x))
    for step in range(5 * feed.steps_per_epoch):
        steps.at(step)
    for rows in ([0, 3, 5, 5], [11, 2]):
        part = views.subset(rows)
        for epoch in range(3):
            rows_of_part = part.training(epoch, range(len(part)))
            rows_of_all = views.training(epoch, rows)
            for one, other in zip(rows_of_part, rows_of_all, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert sum(counts) == 2 * len(feed.images)


def test_what_a_part_of_the_set_is_answered_from() -> None:
    method, feed, steps = views_task()
    rows = [7, 1, 1, 4]
    known = steps.views.subset(rows).inference()
    stage = method.inference_stage(feed.views(rows, None).pixels)
    for one, other in zip(known, stage, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_preparation_reads_the_features_that_trainings_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Main training and folds of a cross-validation walk the same images."""
    method, feed, steps = views_task()
    batches = list(feed.batches())
    expected = torch.cat([method.clip.encode_image(batch.pixels) for batch in batches])
    calls: list[int] = []
    pixels = feed.images.pixels
    monkeypatch.setattr(feed.images, "pixels", lambda rows, *size: calls.extend(rows) or pixels(rows, *size))
    for rows in (range(len(feed.images)), [0, 3, 5, 5]):
        part, images = steps.views.subset(rows), feed.images.subset(list(rows))
        walked = list(StepFeed(method, Feed(images, method.clip, feed.recipe), 100, part).batches())
        features = torch.cat([batch.features for batch in walked])
        torch.testing.assert_close(features, expected[list(rows)], rtol=1e-4, atol=1e-5)
        labels = torch.cat([batch.labels for batch in walked])
        assert torch.equal(labels, feed.images.labels[list(rows)])
    assert len(calls) <= len(feed.images)


def test_views_that_do_not_fit_into_memory_are_computed_again() -> None:
    _, feed, steps = views_task()
    _, _, tight = views_task(limit_bytes=1000)
    for step in range(2 * feed.steps_per_epoch):
        for one, other in zip(steps.at(step).frozen, tight.at(step).frozen, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert tight.views.inference() is None


@pytest.mark.parametrize("name", ["dear", "coop", "purify"])
def test_a_run_with_fixed_views_learns_and_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    task, recipe = Colors(domains=2), Recipe(epochs=5, batch=5, lr=1e-2, views=2)

    def fresh() -> Method:
        return build_method(name, tiny_clip(dtype=torch.float32), task.classes, roles=mixed_roles())

    uninterrupted, again, stops = fresh(), fresh(), []
    lines = train(uninterrupted, task, recipe).lines
    assert lines[-1]["ce"] < lines[0]["ce"]
    with pytest.raises(Paused):
        train(fresh(), task, recipe, tmp_path / "run", stop=lambda: stops.append(1) or len(stops) == 8)
    train(again, task, recipe, tmp_path / "run", resume=True)
    for key, tensor in uninterrupted.adapter_state().items():
        assert torch.equal(again.adapter_state()[key], tensor)


def test_a_loss_that_cannot_be_split_is_refused_when_its_class_is_written() -> None:
    with pytest.raises(TypeError, match="loss_from_frozen"):

        class Whole(DeAR):
            def loss(self, pixels, labels, domains=None):
                return super().loss(pixels, labels, domains)
