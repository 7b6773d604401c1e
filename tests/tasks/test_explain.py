"""`dear explain`: bars that sum to the score, answers without something, sets, the page and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from markupsafe import escape
from PIL import Image
from typer.testing import CliRunner

import dear
from dear.calibration.calibration import Calibration, ModeCalibration
from dear.cli import build_app
from dear.clip import Clip
from dear.clip.correction import Correction
from dear.data.images import ListedImages, values_of
from dear.data.open import open_data
from dear.errors import UsageError
from dear.heads.concept_words import known_concepts, value_features
from dear.heads.known_roles import known_roles
from dear.heads.roles import RoleMap
from dear.methods import build_method
from dear.runs.model import Model
from dear.tasks.explain.dataset import UNUSUAL, explain_set
from dear.tasks.explain.explainer import Explainer
from dear.tasks.explain.explanation import FIXED, UNKNOWN
from dear.tasks.explain.groups import head_groups
from dear.tasks.explain.page import apply_view, overlay
from dear.tasks.explain.parts import smooth
from dear.tasks.explain.regions import where
from dear.tasks.explain.scores import REFERENCE, ScoreParts

NAMES = ("dog", "cat", "bird", "fish", "turtle", "butterfly")


@pytest.fixture(scope="module")
def clip() -> Clip:
    return dear.load("mini")


@pytest.fixture(scope="module")
def train():
    return open_data("world:shortcut-place", "train").subset(list(range(0, 240, 10)))


@pytest.fixture(scope="module")
def test():
    return open_data("world:shortcut-place", "test").subset(list(range(0, 720, 60)))


@pytest.fixture(scope="module")
def zeroshot(clip) -> Model:
    return Model(build_method("zeroshot", clip, NAMES))


@pytest.fixture(scope="module")
def explainer(zeroshot, train) -> Explainer:
    return Explainer(ScoreParts(zeroshot, train))


@pytest.fixture(scope="module")
def explained(explainer, test):
    return explainer.explain(test)


def test_reference_images_are_spread_over_each_class_of_an_ordered_set(zeroshot) -> None:
    test = open_data("world:shortcut-place", "test")  # the images of a class are in order of their places
    images = ScoreParts(zeroshot, test).images
    groups = values_of(images)
    assert images.labels.bincount().tolist() == [REFERENCE // len(NAMES)] * len(NAMES)
    for label in range(len(NAMES)):
        places = {groups[row] for row in (images.labels == label).nonzero()[:, 0].tolist()}
        assert places == set(values_of(test))


def test_bars_sum_to_the_scores_of_both_classes(explainer, explained, test) -> None:
    logits = explainer.model.logits(test)["default"].double()
    centered = logits - logits.mean(1, keepdim=True)
    for row, one in enumerate(explained):
        pair = [NAMES.index(name) for name in (one.answer, one.other)]
        assert pair == logits[row].topk(2).indices.tolist()
        assert [sum(b.answer for b in one.bars), sum(b.other for b in one.bars)] == pytest.approx(
            centered[row, pair].tolist(), abs=1e-4
        )
        assert one.exact == 1
        assert dict(one.probabilities)[one.answer] == pytest.approx(
            float(logits[row].softmax(0)[pair[0]]), abs=1e-5
        )


def test_maps_and_heads_are_parts_of_the_bars(explainer, explained) -> None:
    one = explained[0]
    assert one.maps[""].shape == (2, 8, 8)
    groups = sum(one.maps[name] for name in explainer.scores.groups.heads)
    torch.testing.assert_close(smooth(groups), one.maps[""], atol=1e-5, rtol=1e-4)
    assert {head.group for head in one.heads} <= set(explainer.scores.groups.heads)
    differences = [abs(head.answer - head.other) for head in one.heads]
    assert differences == sorted(differences, reverse=True)


def test_without_a_role_is_the_answer_of_the_features_with_its_heads_at_their_mean(
    explainer, explained, clip, train, test
) -> None:
    from dear.heads.collect import collect_contributions

    heads = known_roles(clip).select(concept="Location")
    mean = collect_contributions(clip, train).outputs.mean(0)
    images = collect_contributions(clip, test)
    features = images.features + images.change(heads, mean)
    texts = explainer.method.prompts.frozen
    logits = clip.logit_scale * torch.nn.functional.normalize(features, dim=-1) @ texts.T
    for row, one in enumerate(explained):
        found = next(other for other in one.without_heads if other.name == "Location")
        assert found.heads == len(heads)
        assert found.answer == NAMES[int(logits[row].argmax())]
        assert found.probability == pytest.approx(float(logits[row].softmax(0).max()), abs=1e-3)


def test_without_a_concept_its_words_say_nothing(explainer, explained, clip, train, test) -> None:
    """A removal by heads and words, as `dear repair` would apply it."""
    from dear.heads.collect import collect_contributions
    from dear.shortcuts.removal import combine, remove_heads, remove_span

    seen_images = collect_contributions(clip, train)
    heads = known_roles(clip).select(concept="Location")
    span = remove_span(seen_images, value_features(clip, known_concepts()["Location"])[1], "Location")
    both = combine(remove_heads(seen_images, heads, "Location"), span)
    other = explainer.model.with_correction(both.correction())
    logits = other.logits(test)["default"]
    for row, one in enumerate(explained):
        found = next(each for each in one.without_concepts if each.name == "Location")
        assert found.answer == NAMES[int(logits[row].argmax())]
        assert found.probability == pytest.approx(float(logits[row].softmax(0).max()), abs=5e-3)
    late = {
        name: len(heads) for name, heads in explainer.scores.groups.heads.items() if name != "Earlier heads"
    }
    added = {bar.name: bar.lead for bar in explained[0].bars if bar.name in late}
    each_head = sum(added.values()) / sum(late.values())
    order = [
        each.drop_beyond_chance
        + (added[each.name] - each_head * late[each.name] if each.name in added else 0.0)
        for each in explained[0].without_concepts
    ]
    assert order == sorted(order, reverse=True)


def test_any_two_classes_can_be_compared(explainer, test) -> None:
    one = explainer.explain(test.subset([0]), answer="Fish", against="dog")[0]
    assert (one.answer, one.other) == ("fish", "dog")
    swapped = explainer.explain(test.subset([0]), answer="dog", against="fish")[0]
    assert [bar.lead for bar in one.bars] == pytest.approx([-bar.lead for bar in swapped.bars])
    for wrong in ({"answer": "horse"}, {"answer": "dog", "against": "dog"}):
        with pytest.raises(UsageError):
            explainer.explain(test.subset([0]), **wrong)


def test_calibration_and_a_probes_bias_are_parts(clip, train, test) -> None:
    probe = build_method("linear-probe", clip, NAMES)
    with torch.no_grad():
        probe.weight.normal_(std=1e-4, generator=torch.Generator().manual_seed(0))
        probe.bias.copy_(torch.arange(6.0))
    own = ModeCalibration(temperature=2.0, new_temperature=1.0, logits=(0.5, 0.6))
    model = Model(probe, Calibration(modes={"default": own}))
    found = Explainer(ScoreParts(model)).explain(test.subset([0, 1]))
    for row, one in enumerate(found):
        scaled = model.calibrator.calibrate(model.logits(test.subset([row]))["default"], "default")[
            0
        ].double()
        pair = [NAMES.index(one.answer), NAMES.index(one.other)]
        assert sum(bar.answer for bar in one.bars) == pytest.approx(
            float(scaled[pair[0]] - scaled.mean()), abs=1e-4
        )
        constants = next(bar for bar in one.bars if bar.name == FIXED)
        assert constants.lead == pytest.approx((pair[0] - pair[1]) / 2, abs=0.2)  # bias over temperature
        assert not one.without_concepts
        assert any("reference" in notice for notice in one.notices)


def test_what_cannot_be_taken_apart_is_one_bar_and_is_said(clip, test, train) -> None:
    from dear.methods.frozen import Batch

    tip = build_method("tip-adapter", clip, NAMES, views=0)
    pixels = torch.randn(6, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    tip.prepare(lambda augment: iter([Batch(pixels, torch.arange(6))]))
    one = Explainer(ScoreParts(Model(tip))).explain(test.subset([0]))[0]
    assert 0 < one.exact < 1
    assert UNKNOWN in {bar.name for bar in one.bars}
    assert any("kernel" in notice for notice in one.notices)


def test_a_removal_has_a_bar_with_its_note(clip, test) -> None:
    size = clip.config.embed_dim
    corrected = clip.with_correction(
        Correction(torch.eye(size), torch.full((size,), 0.05), note="Location by words")
    )
    one = Explainer(ScoreParts(Model(build_method("zeroshot", corrected, NAMES)))).explain(test.subset([0]))[
        0
    ]
    assert "Removal of Location by words" in {bar.name for bar in one.bars}


def test_groups_hold_every_head_once(clip) -> None:
    vision = clip.config.vision
    every = {(layer, head) for layer in range(1, 13) for head in range(12)}
    for roles in (known_roles(clip), None, RoleMap.uniform("mixed", range(9, 13), 12)):
        groups = head_groups(vision, roles)
        listed = [key for heads in groups.heads.values() for key in heads]
        assert set(listed) == every
        assert len(listed) == len(every)
        assert groups.by_role == (roles is not None and roles.rule != "uniform")
        assert bool(groups.notice) != groups.by_role


def test_a_set_tells_which_parts_carry_its_answers(explainer, test, tmp_path: Path) -> None:
    found = explain_set(explainer, test)
    logits = explainer.model.logits(test)["default"].double()
    torch.testing.assert_close(found.answers, logits.argmax(1))
    best = logits.max(1).values - logits.mean(1)
    torch.testing.assert_close(found.values.sum(1), best, atol=1e-4, rtol=0)
    right = (found.answers == found.labels) & (found.labels == 0)
    if bool(right.any()):
        torch.testing.assert_close(found.mixture(0, True), found.values[right].mean(0))
    found.write_page(tmp_path / "set.html")
    assert "data:image" in (tmp_path / "set.html").read_text()
    assert escape((tmp_path / "set.html").read_text()) in found._repr_html_()
    frame = found.to_frame()
    assert frame[list(found.parts)].sum(axis=1).tolist() == pytest.approx(best.tolist(), abs=1e-4)
    with pytest.raises(UsageError, match="world:textures"):
        explain_set(explainer, open_data("world:textures", "test"))


def test_an_image_that_differs_from_the_others_is_unusual(explainer) -> None:
    plain = open_data("world:shortcut-place", "train")
    rows = (plain.labels == 0).nonzero()[:12, 0].tolist()  # dogs at the beach
    test = open_data("world:shortcut-place", "test")
    elsewhere = next(
        row for row, place in enumerate(test.groups) if place != "beach" and not test.labels[row]
    )
    images = [plain.image(row) for row in rows] + [test.image(elsewhere)]
    dogs = ListedImages(tuple(images), torch.zeros(len(images), dtype=torch.int64), plain.classes)
    found = explain_set(explainer, dogs)
    assert len(rows) in found.unusual[:3]
    assert len(found.unusual) == UNUSUAL
    assert list(found.distances) == sorted(found.distances, reverse=True)


def test_where_finds_the_animal(clip) -> None:
    """Animals on a plain background: the phrase's parts lie on the animal more than beside it."""
    images = open_data("world:shortcut-place", "test")
    hits = 0
    for row in range(0, 120, 20):  # dogs at all places
        image = images.image(row)
        found = where(clip, image, "a dog")
        assert found.shape == (8, 8)
        center = found[2:6, 2:6].mean()
        hits += int(center > found.mean())
    assert hits >= 5
    with pytest.raises(UsageError):
        where(clip, image, " ")


def test_overlay_is_red_for_and_blue_against() -> None:
    picture = overlay(Image.new("RGB", (32, 32), "white"), torch.tensor([[1.0, -1.0]]).expand(2, 2))
    left, right = picture.getpixel((10, 112)), picture.getpixel((213, 112))
    assert left[0] > left[2]
    assert right[2] > right[0]


def test_the_page_escapes_names_and_shows_the_heads(explainer, test, tmp_path: Path) -> None:
    image = test.image(0)
    image.save(tmp_path / "<b>odd.png")
    found = explainer.explain([tmp_path / "<b>odd.png"])
    found.write_page(tmp_path / "why.html")
    page = (tmp_path / "why.html").read_text()
    assert "<b>odd" not in page
    assert "&lt;b&gt;odd.png" in page
    assert apply_view(image, explainer.model.clip.config.view).size == found[0].view.size == (64, 64)


def test_the_command_writes_a_page_and_json(tmp_path: Path, test) -> None:
    from dear.tasks.adapt import adapt

    adapt(
        "world:shortcut-place",
        tmp_path / "run",
        backbone="mini",
        method="zeroshot",
        shots=2,
        calibrate=False,
        check=False,
    )
    test.image(0).save(tmp_path / "photo.png")
    runner, app = CliRunner(), build_app()
    words = ["explain", str(tmp_path / "run"), str(tmp_path / "photo.png")]
    done = runner.invoke(app, [*words, "--out", str(tmp_path / "why.html"), "--json"], catch_exceptions=False)
    facts = json.loads(done.stdout)["images"][0]
    assert sum(bar["answer"] for bar in facts["bars"]) == pytest.approx(facts["scores"][0], abs=1e-4)
    assert facts["without_concepts"]
    assert (tmp_path / "why.html").stat().st_size > 10_000
    with pytest.raises(UsageError, match="'horse'"):
        runner.invoke(app, [*words, "--class", "horse"], catch_exceptions=False)
    with pytest.raises(UsageError, match="--data"):
        runner.invoke(app, words[:2], catch_exceptions=False)
