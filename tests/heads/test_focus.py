"""The focused feature against the sum of contributions, and the choice of a role on made-up data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec import structs

import dear
from dear.clip.correction import Correction
from dear.data.world_images import world_task
from dear.errors import UsageError
from dear.heads import decompose
from dear.heads.collect import collect_contributions
from dear.heads.concept_words import find_attribute
from dear.heads.focus import (
    attribute_heads,
    choose_focus,
    choose_focus_weight,
    focus_by_names,
    focused_feature,
)
from dear.heads.known_roles import known_roles
from dear.methods import build_method
from dear.methods.frozen import encode_with_focus

HEADS = ((9, 0), (10, 3), (12, 4))


@pytest.fixture(scope="module")
def clip():
    return dear.load("mini")


@pytest.fixture(scope="module")
def pixels():
    return torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def test_one_run_gives_the_feature_and_what_the_heads_add(clip, pixels):
    parts = decompose(clip, pixels)
    expected = sum(parts.heads[:, layer - 1, head] for layer, head in HEADS)
    stage = encode_with_focus(clip, pixels, HEADS)
    torch.testing.assert_close(stage.x, clip.encode_image(pixels), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stage.focus, expected, atol=1e-5, rtol=1e-4)
    contribution = collect_contributions(clip, pixels).contribution(HEADS)
    torch.testing.assert_close(contribution, stage.focus, atol=1e-5, rtol=1e-4)
    assert encode_with_focus(clip, pixels, ()).focus is None


@pytest.mark.parametrize("removed", [(11, 2), (8, 2)])  # also one before all heads of the focus
def test_a_correction_changes_the_terms_with_the_feature(clip, pixels, removed):
    width = clip.config.embed_dim
    matrix = torch.randn(width, width, generator=torch.Generator().manual_seed(2)) / width**0.5
    other = clip.with_correction(Correction(matrix, torch.ones(width), heads=(removed,)))
    parts = decompose(clip, pixels)
    terms = sum(parts.heads[:, layer - 1, head] for layer, head in HEADS)
    stage = encode_with_focus(other, pixels, HEADS)
    torch.testing.assert_close(
        stage.x,
        (parts.total() - parts.heads[:, removed[0] - 1, removed[1]]) @ matrix + 1,
        atol=1e-4,
        rtol=1e-3,
    )
    torch.testing.assert_close(stage.focus, terms @ matrix, atol=1e-5, rtol=1e-3)
    more = encode_with_focus(other, pixels, [*HEADS, removed])
    torch.testing.assert_close(more.focus, stage.focus)  # a removed head adds nothing


def test_a_method_sorts_the_heads_of_its_focus_and_refuses_unknown_ones(clip):
    method = build_method("linear-probe", clip, ("cat", "dog"), focus=[*reversed(HEADS), HEADS[0]])
    assert method.focus == HEADS
    assert build_method("linear-probe", clip, ("cat", "dog")).focus == ()
    with pytest.raises(UsageError) as refusal:
        build_method("linear-probe", clip, ("cat", "dog"), focus=[(9, 12)])
    assert "head 12" in str(refusal.value)
    assert "layer 9" in str(refusal.value)


def test_the_focused_feature_is_that_of_the_method_page():
    rng = np.random.default_rng(0)
    z, c = rng.normal(size=(5, 4)), rng.normal(size=(5, 4))
    expected = np.concatenate(
        [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (z - z.mean(0), c - c.mean(0))],
        axis=1,
    ) * np.array([1, 1, 1, 1, 2, 2, 2, 2])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    features, terms = torch.from_numpy(z), torch.from_numpy(c)
    mean = torch.cat([features.mean(0), terms.mean(0)])
    np.testing.assert_allclose(focused_feature(features, terms, mean, 2.0).numpy(), expected, atol=1e-12)


def _made_up(informative: bool):
    """Features of noise, and a part in which the classes differ or do not."""
    rng = torch.Generator().manual_seed(3)
    labels = torch.arange(6).repeat_interleave(6)
    noise = [torch.randn(36, 16, generator=rng) for _ in range(3)]
    part = noise[1] + 3.0 * informative * torch.randn(6, 16, generator=rng)[labels]
    return noise[0] + part / 4, {"Color": part, "Shape": noise[2]}, labels


HEADS_OF = {"Color": ((9, 1),), "Shape": ((9, 2),)}


def test_the_role_in_which_classes_differ_is_chosen():
    features, parts, labels = _made_up(informative=True)
    choice = choose_focus(features, parts, labels, HEADS_OF)
    assert (choice.role, choice.heads) == ("Color", ((9, 1),))
    assert choice.scores["Color"] > choice.scores["none"] + 0.1
    assert "Color" in choice.why


def test_noise_is_not_chosen_but_can_be_named():
    features, parts, labels = _made_up(informative=False)
    assert choose_focus(features, parts, labels, HEADS_OF).role is None
    named = choose_focus_weight(features, parts["Shape"], labels, "Shape", HEADS_OF["Shape"])
    assert named.role == "Shape"


def test_class_names_choose_where_images_cannot(clip):
    heads = attribute_heads(known_roles(clip))
    places = world_task("scenes", "train").classes
    assert focus_by_names(clip, places, heads).role == "Location"
    assert focus_by_names(clip, world_task("fauna", "train").classes, heads).role is None


@pytest.mark.parametrize(
    ("word", "attribute"),
    [(" location", "Location"), ("background", "Location"), ("COLOUR", "Color"), ("material", "Texture")],
)
def test_attributes_have_other_names(word, attribute):
    assert find_attribute(word, ("Color", "Texture", "Location")) == attribute


def test_an_attribute_with_that_name_is_preferred_to_an_alias():
    assert find_attribute("background", ("Location", "Background")) == "Background"


def test_an_unknown_attribute_is_refused_with_the_known_ones():
    with pytest.raises(UsageError) as refused:
        find_attribute("weather", ("Color", "Location"))
    assert all(name in str(refused.value) for name in ("'weather'", "Color", "Location"))


def test_a_map_close_to_chance_has_no_attributes(clip):
    known = known_roles(clip)
    assert attribute_heads(known)
    chance = {"bits": 0.41, "rotated": 0.4, "deviation": 0.02, "rotations": 8}
    poor = structs.replace(known, evidence={**known.evidence, "information": chance})
    assert attribute_heads(poor) == {}
