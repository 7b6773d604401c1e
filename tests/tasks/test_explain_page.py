"""Everything on a page of `dear explain` is on one scale and adds up, for every method."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from explain_oracles import NAMES, method_of
from markupsafe import escape
from msgspec import structs
from tiny import Colors, mixed_roles, tiny_clip

from dear.calibration.calibration import Calibration, ModeCalibration
from dear.data.images import ListedImages
from dear.methods import METHODS
from dear.runs.model import Model
from dear.tasks.explain.explainer import Explainer
from dear.tasks.explain.explanation import AVERAGE, LARGE_SHARE, Bar, Counterfactual, Explanation
from dear.tasks.explain.page import explanation_values, explanations_page
from dear.tasks.explain.scores import ScoreParts


def calibrated_model(name: str) -> Model:
    method = method_of(name, tiny_clip(dtype=torch.float32))
    scale = ModeCalibration(temperature=2.0, new_temperature=1.0, logits=(0.5, 0.6))
    model = Model(method)
    return Model(method, Calibration(modes={model.pick_mode(None): scale}))


@pytest.mark.parametrize("name", METHODS)
def test_what_the_page_shows_adds_up_to_the_lead_in_calibrated_logits(name: str) -> None:
    model, images = calibrated_model(name), Colors(each=1, seed=5).subset([0, 1])
    explainer = Explainer(ScoreParts(model, Colors(each=1), mixed_roles()))
    mode = model.pick_mode(None)
    logits = model.calibrator.calibrate(model.logits(images)[mode], mode).double()
    result = explainer.explain(images)
    for row, one in enumerate(result):
        pair = [NAMES.index(one.answer), NAMES.index(one.other)]
        lead = float(logits[row, pair[0]] - logits[row, pair[1]])
        assert one.lead == pytest.approx(lead, abs=1e-4)
        shown = explanation_values(one)
        values = [[float(bar["texts"][k]) for bar in shown["bars"]] for k in (0, 1)]
        rounding = 0.006 * 2 * len(values[0])
        assert sum(values[0]) - sum(values[1]) == pytest.approx(lead, abs=rounding)
        assert [sum(each) for each in values] == pytest.approx(
            [float(total) for total in shown["totals"]], abs=rounding
        )
        bars = {bar.name: bar for bar in one.bars}
        for (
            group,
            heads,
        ) in explainer.scores.groups.heads.items():  # heads of a group, and its map, are its bar
            both = sum(one.head_parts[:, layer - 1, head] for layer, head in heads)
            assert both.tolist() == pytest.approx([bars[group].answer, bars[group].other], abs=1e-4)
        for name_, values_ in one.maps.items():
            if name_:
                both = [bars[name_].answer, bars[name_].other]
                assert values_.sum((1, 2)).tolist() == pytest.approx(both, abs=1e-4)
        every = sum(values_.sum((1, 2)) for name_, values_ in one.maps.items() if name_)
        torch.testing.assert_close(one.maps[""].sum((1, 2)), every, atol=1e-4, rtol=1e-4)
        for head in one.heads:
            assert head.answer == float(one.head_parts[0, head.layer - 1, head.head])


@pytest.mark.parametrize("name", ["zeroshot", "linear-probe", "dear", "proker"])
def test_parts_are_zero_on_average_and_the_rest_is_the_average_image(name: str) -> None:
    model, images = calibrated_model(name), Colors(each=3)
    explainer = Explainer(ScoreParts(model, images, mixed_roles()))
    result = explainer.explain(images, answer=NAMES[0], against=NAMES[1])
    frame = result.to_frame()
    means = frame.groupby("part")[["answer_score", "against_score"]].mean()
    scores = torch.tensor([one.scores for one in result]).mean(0).tolist()
    assert means.loc[AVERAGE].tolist() == pytest.approx(scores, abs=1e-4)
    assert means.drop(AVERAGE).abs().to_numpy().max() < 1e-4


def test_unreadable_reference_images_are_skipped(tmp_path: Path) -> None:
    good = Colors(each=2)
    files = []
    for row in range(len(good)):
        files.append(tmp_path / f"{row}.png")
        good.image(row).save(files[-1])
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(files[0].read_bytes()[:60])
    labels = good.labels
    clean = ListedImages(tuple(files), labels, good.classes, name="clean")
    mixed = ListedImages(
        (damaged, *files), torch.cat([labels[:1], labels]), good.classes, name="one is damaged"
    )
    model, query = calibrated_model("zeroshot"), good.subset([1])
    one, other = (
        Explainer(ScoreParts(model, images, mixed_roles())).explain(query)[0] for images in (clean, mixed)
    )
    assert [bar.answer for bar in one.bars] == pytest.approx([bar.answer for bar in other.bars], abs=1e-6)
    assert len(other.neighbors) == len(files) - 1  # one of them is the image itself
    assert all(near.image is not None for near in other.neighbors)


def explanation(bars: list[Bar], concepts: tuple[Counterfactual, ...] = ()) -> Explanation:
    scores = (sum(bar.answer for bar in bars), sum(bar.other for bar in bars))
    empty = torch.zeros(2, 1, 1)
    view = Colors().image(0)
    ahead = scores[0] > scores[1]
    order = (("sushi", 0.9), ("ramen", 0.1)) if ahead else (("ramen", 0.9), ("sushi", 0.1))
    return Explanation(
        "a.jpg",
        view,
        "sushi",
        "ramen",
        order,
        scores,
        tuple(bars),
        empty,
        (),
        {"": empty},
        without_concepts=concepts,
    )


def test_the_sentence_names_the_largest_part_of_the_lead() -> None:
    bars = [Bar("Style", "role", 0.1, 0.3), Bar(AVERAGE, "average", 3.0, 0.0), Bar("MLPs", "rest", 0.6, 0.0)]
    one = explanation(bars)
    assert bars[1].words in one.sentence
    assert "Style" not in one.sentence
    assert "+3.00" in one.sentence
    role = explanation([Bar("Color", "role", 2.0, 0.0), Bar("MLPs", "rest", 0.6, 0.0)])
    assert "the heads for Color" in role.sentence
    behind = explanation([Bar("Color", "role", 0.5, 0.0), Bar("MLPs", "rest", 0.0, 2.0)])
    assert bars[2].words in behind.sentence


def test_the_sentence_calls_less_than_half_of_the_support_not_most_of_it() -> None:
    parts = [Bar("Color", "role", 1.0, 0.0), Bar("MLPs", "rest", 0.7, 0.0), Bar("Style", "role", 0.6, 0.0)]
    sentence = explanation(parts).sentence
    assert "mostly" not in sentence
    assert "the heads for Color" in sentence
    assert "mostly" in explanation(parts[:2]).sentence


def test_the_sentence_calls_no_small_part_the_reason() -> None:
    many = explanation([Bar(f"Layer {n}", "layer", 0.2 + 0.01 * n, 0.0) for n in range(12)])
    assert "mostly" not in many.sentence
    assert "layer 11" in many.sentence


def test_the_sentence_names_a_concept_only_if_much_depends_on_it() -> None:
    bars = [Bar("Color", "role", 2.0, 0.0)]
    for drop in (0.1, 1.5):
        concept = Counterfactual("Location", drop, drop, "ramen", 0.7, "beach", 3)
        assert ("Location" in explanation(bars, (concept,)).sentence) == (drop >= LARGE_SHARE * 2.0)


@pytest.mark.parametrize("name", ["zeroshot", "dear"])
def test_a_map_close_to_chance_names_no_concept(name: str) -> None:
    roles = mixed_roles()
    chance = {"bits": 0.4, "rotated": 0.4, "deviation": 0.02, "rotations": 8}
    poor = structs.replace(roles, evidence={"information": chance})
    model, images = calibrated_model(name), Colors(each=2)
    result = Explainer(ScoreParts(model, images, poor)).explain(images.subset([0, 1]))
    tokens = int(name == "dear")
    page = explanations_page(result)
    concepts = {role.concept for _, role in roles if role.concept}
    for one in result:
        assert not one.without_concepts
        assert {bar.kind for bar in one.bars} - {"token"} == {"layer", "rest", "average"}
        assert [bar.kind for bar in one.bars].count("token") == tokens
        assert not any(head.phrases for head in one.heads)
        assert not any(concept in one.sentence for concept in concepts)
    assert page.count(poor.caveat()) == 1
    body = re.sub(r"data:image/[^\"]*", "", page[page.index("<h1") :])
    assert not [concept for concept in concepts if f">{concept}<" in body]


def test_results_render_and_become_tables(tmp_path: Path) -> None:
    model, images = calibrated_model("linear-probe"), Colors(each=2)
    explainer = Explainer(ScoreParts(model, images, mixed_roles()))
    result = explainer.explain(images.subset([0, 1, 2]))
    assert [len(part) for part in (result, result[:2])] == [3, 2]
    frame = result.to_frame()
    assert len(frame) == sum(len(one.bars) for one in result)
    assert frame.groupby("image")["lead"].sum().tolist() == pytest.approx(
        [one.lead for one in result], abs=1e-4
    )
    result.write_page(tmp_path / "why.html")
    assert escape((tmp_path / "why.html").read_text()) in result._repr_html_()
