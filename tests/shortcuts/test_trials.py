"""Which way removes a property: on features made so that the answer is known."""

from __future__ import annotations

import pytest
import torch

import dear
from dear.data import few_shot
from dear.heads.collect import HeadContributions
from dear.runs.spec import Spec
from dear.shortcuts.concept_trials import choose_concept_removal
from dear.shortcuts.edit_trials import (
    EditedFeatures,
    choose_edit_removal,
    edit_heads,
    remove_directions,
    remove_edit_heads,
    remove_random_heads,
)
from dear.shortcuts.removal import remove_examples, remove_span
from dear.train.setup.prepare import prepare

WIDTH, CLASSES, EACH = 16, 4, 16


def images(shift: torch.Tensor, seed: int = 0) -> HeadContributions:
    """Features with a class direction each; one head of two layers of three adds `shift` [n, E]."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(CLASSES).repeat_interleave(EACH)
    features = 2 * torch.eye(WIDTH)[labels] + 0.3 * torch.randn(len(labels), WIDTH, generator=generator)
    outputs = 0.05 * torch.randn(len(labels), 2, 3, WIDTH, generator=generator)
    outputs[:, 1, 2] += shift
    maps = torch.eye(WIDTH).expand(2, 3, WIDTH, WIDTH)
    return HeadContributions(features + outputs.sum((1, 2)), outputs, maps, (5, 6))


@pytest.fixture
def planted() -> EditedFeatures:
    """The first class's images moved along the last direction; the edit moves all images so."""
    labels = torch.arange(CLASSES).repeat_interleave(EACH)
    step = torch.zeros(WIDTH)
    step[-1] = 4.0
    marked = (labels == 0)[:, None] * step
    return EditedFeatures(images(marked), (images(step.expand(len(labels), -1)),), labels, (0,))


def test_directions_of_the_edit_bring_the_answers_back(planted: EditedFeatures) -> None:
    choice = choose_edit_removal(planted, ("brightness",))
    nothing = choice.trials["nothing"]
    assert nothing.moved > 0.5
    assert choice.trials[choice.way].moved < 0.05
    assert choice.trials[choice.way].accuracy >= nothing.accuracy - 0.02
    assert choice.random is not None
    assert choice.random.moved > 0.5 * nothing.moved
    removed = remove_directions(planted, ("brightness",), 1)
    assert removed.rank == 1
    assert float(removed.removed[-1, -1]) == pytest.approx(1.0, abs=0.02)


def test_the_head_that_carries_the_edit_is_found(planted: EditedFeatures) -> None:
    assert edit_heads(planted) == ((6, 2),)
    repair = remove_edit_heads(planted, ("brightness",))
    remaining = repair.apply(planted.original)
    gap = remaining[planted.labels == 0].mean(0) - remaining[planted.labels != 0].mean(0)
    assert abs(float(gap[-1])) < 0.1
    other = remove_random_heads(planted, ("brightness",), 2, seed=1)
    assert len(other.heads) == 2


def test_without_a_class_that_stands_out_wrong_answers_count(planted: EditedFeatures) -> None:
    scrambled = images(torch.zeros(len(planted.labels), WIDTH), seed=3)
    broken = HeadContributions(
        scrambled.features.flip(0), scrambled.outputs.flip(0), scrambled.maps, scrambled.layers
    )
    seen = EditedFeatures(images(torch.zeros(len(planted.labels), WIDTH)), (broken,), planted.labels, (-1,))
    assert choose_edit_removal(seen, ("size",)).trials["nothing"].moved > 0.9


def test_a_class_that_only_the_property_tells_does_not_stop_its_removal(planted: EditedFeatures) -> None:
    """Its own held-out images have the property, too: right answers that rest on it are no reason."""

    def alike(each: HeadContributions) -> HeadContributions:
        features = each.features.clone()
        features[planted.labels == 0] += 2 * (torch.eye(WIDTH)[1] - torch.eye(WIDTH)[0])
        return HeadContributions(features, each.outputs, each.maps, each.layers)

    seen = EditedFeatures(alike(planted.original), (alike(planted.copies[0]),), planted.labels, (0,))
    choice = choose_edit_removal(seen, ("frame",))
    assert choice.trials["nothing"].moved > 0.2
    assert choice.trials[choice.way].moved < 0.5 * choice.trials["nothing"].moved


@pytest.mark.parametrize("method", ["vpt", "dear"])
def test_a_method_that_learns_inside_the_tower_takes_edited_copies(method: str) -> None:
    images = few_shot(dear.open_data("world:textures"), 2, 1)
    spec = Spec(method=method, without=("brightness",))
    job = prepare(spec, images, drawn=True, clip=dear.load("mini"))
    assert job.edits is not None
    assert job.edits.way == "copies"
    assert job.edits.copies
    named = prepare(spec.changed(way="directions"), images, drawn=True, clip=dear.load("mini"))
    assert named.edits is not None
    assert named.edits.way == "directions"


def test_with_one_image_per_class_or_one_class_ways_are_not_compared(planted: EditedFeatures) -> None:
    one_per_class = torch.arange(CLASSES * EACH) % EACH == 0
    edited = planted.subset(one_per_class)
    assert choose_edit_removal(edited, ["mark"]) is None
    generator = torch.Generator().manual_seed(0)
    examples, values = torch.randn(20, WIDTH, generator=generator), torch.arange(20) % 2
    ways = {
        "words": remove_span(edited.original, torch.randn(3, WIDTH, generator=generator), "Color"),
        "examples": remove_examples(edited.original, examples, values, "Color"),
    }
    one_class = torch.zeros_like(edited.labels)
    for labels, heads_first in ((edited.labels, False), (edited.labels, True), (one_class, False)):
        choice = choose_concept_removal(edited.original, labels, ways, heads_first=heads_first)
        assert (choice.way, choice.scores, choice.before) == ("words", {}, None)
