"""Calibration, "none of these", added classes and `choose`, end to end on tiny models."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import Colors, mixed_roles, tiny_clip

from dear.calibration.calibration import Calibration, threshold
from dear.calibration.reference import PER_CLASS, draw_reference
from dear.classifier import Classifier
from dear.errors import DataError, RunError, UsageError
from dear.runs.folder import load_run
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.tasks.adapt import adapt
from dear.tasks.choose.result import Candidate, Choice
from dear.tasks.choose.task import _best, choose
from dear.tasks.evaluate import evaluate
from dear.train.crossval import Trials, class_folds, image_folds
from dear.train.setup.prepare import prepare

CLIP = tiny_clip(dtype=torch.float32)
QUICK = {"epochs": 3, "batch": 8, "lr": 1e-2}


def candidate(name: str, images: Any, recipe: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """An untrained method and its recipe."""
    roles = mixed_roles() if name == "dear" else None
    job = prepare(Spec().changed(method=name, recipe=recipe), images, clip=CLIP, roles=roles)
    return job.method, job.recipe


@pytest.fixture(scope="module")
def colors() -> Colors:
    return Colors(classes=4, each=6)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, colors: Colors) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    adapt(colors, out, method="dear", backbone=CLIP, roles=mixed_roles(), recipe=QUICK)
    return out


def test_folds_hold_every_image_out_once_and_single_images_never() -> None:
    labels = torch.tensor([0] * 5 + [1] * 4 + [2])
    parts = image_folds(labels, 2, seed=3)
    assert sorted(torch.cat(parts).tolist()) == list(range(9))
    for part in parts:
        left = set(range(10)) - set(part.tolist())
        assert {int(labels[i]) for i in left} == {0, 1, 2}  # every class can be trained
    kept = [set(kept.tolist()) for kept, _ in class_folds("abcdefg", 1)]
    assert kept[0] | kept[1] == set(range(7))
    assert not kept[0] & kept[1]


def test_held_out_classes_do_not_depend_on_their_order() -> None:
    turns = [
        [{names[label] for label in labels.tolist()} for labels, _ in class_folds(names, 1)]
        for names in ("abcdefg", "gcafbed")
    ]
    assert turns[0] == turns[1]


def test_training_images_are_kept_by_content_where_there_are_many() -> None:
    contents = [bytes([number]) for number in range(100)]
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0)).tolist()
    labels = torch.zeros(100, dtype=torch.int64)
    first, second = (
        {some[place] for place in draw_reference(labels, contents=some).tolist()}
        for some in (contents, [contents[place] for place in order])
    )
    assert first == second
    assert len(first) == PER_CLASS


def test_a_run_stores_its_calibration_and_answers_with_it(run: Path, colors: Colors) -> None:
    stored = json.loads((run / "calibration.json").read_text())
    model = Model.load(run, CLIP)
    method = model.method
    assert model.calibration is not None
    assert set(stored["modes"]) == set(model.modes)
    assert stored["images"] == 24
    mode = method.modes[0]
    own = model.calibration.modes[mode]
    assert len(own.logits) == len(model.calibration.nearness) == 24
    assert len(model.reference.features) == 24
    assert (run / "reference.safetensors").is_file()
    images = [colors.image(i) for i in range(8)]
    pixels = torch.stack([CLIP.preprocess(image) for image in images])
    z = method.logits(pixels).numpy() / own.temperature
    expected = np.exp(z - z.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(model.probabilities(images).numpy(), expected, rtol=1e-4)


def test_new_and_trained_classes_stand_on_one_scale(run: Path) -> None:
    model = Model.load(run, CLIP)
    both = model.with_classes(["purple", "orange"], add=True)
    assert both.trained == (True,) * 4 + (False,) * 2
    own = model.calibration.modes[model.modes[0]]
    scale, shift = both.calibrator.scales(both.modes[0])
    np.testing.assert_allclose(scale.numpy(), 1 / own.temperature, rtol=1e-6)
    assert shift.tolist() == [0.0] * 6
    alone, _ = model.with_classes(["purple", "orange"]).calibrator.scales(model.modes[0])
    np.testing.assert_allclose(alone.numpy(), 1 / own.new_temperature, rtol=1e-6)


def literal_refusals(model: Model, images: list[Any], share: float, nearness: bool = True) -> list[bool]:
    """Whether each image is none of the classes, written out with numpy."""
    method, own = model.method, model.calibration.modes[model.modes[0]]
    pixels = torch.stack([CLIP.preprocess(image) for image in images])
    largest = (method.logits(pixels) / own.temperature).amax(1).double().numpy()
    parts = [(largest, np.array(own.logits))]
    if nearness:
        unit = torch.nn.functional.normalize(CLIP.encode_image(pixels).float(), dim=1).numpy()
        cosines = np.sort(unit @ model.reference.features.float().numpy().T, axis=1)
        parts.append((cosines[:, -5:].mean(axis=1), np.array(model.calibration.nearness)))
    scores = []
    for which in (0, 1):  # of the images, of the held-out ones
        logit, *near = [(part[which] - part[1].mean()) / part[1].std() for part in parts]
        scores.append(logit - sum(np.minimum(each, 0) ** 2 for each in near))
    return (scores[0] < threshold(scores[1].tolist(), share).value).tolist()


def test_predict_refuses_what_scores_below_the_threshold(run: Path, colors: Colors) -> None:
    model = Model.load(run, CLIP)
    images = [colors.image(i) for i in range(24)] + [Image.new("RGB", (9, 9), c) for c in ("gray", "white")]
    answers = Model.of(run, CLIP).answers(images, reject=0.3)
    expected = literal_refusals(model, images, 0.3)
    assert [a.rejected for a in answers] == expected
    assert 0 < sum(expected) < len(images)
    assert all(a.classes for a in answers)  # the nearest class stays beside it
    assert not any(a.rejected for a in Model.of(run, CLIP).answers(images))
    # Images of a class that was not trained need not be near the training images: the logit stands alone.
    mixed = model.with_classes(["red fox"], add=True)
    added = model.answers(images, reject=0.3, classes=["red fox"], add=True)
    assert [a.rejected for a in added] == literal_refusals(mixed, images, 0.3, nearness=False)


def test_classes_that_clip_cannot_distinguish_are_refused(run: Path) -> None:
    model = Model.load(run, CLIP)
    name = model.classes[0]
    for names, add in (([name.upper()], True), ([name.upper(), "fox"], False), (["fox", "Fox"], True)):
        with pytest.raises(UsageError, match=names[-1] if name.upper() not in names else name.upper()):
            model.with_classes(names, add=add)
    assert model.with_classes([name, "fox"], add=True).classes == (*model.classes, "fox")


def test_classes_are_added_or_replaced(run: Path, colors: Colors) -> None:
    image = [colors.image(0)]
    added = Model.of(run, CLIP).answers(image, classes=["red fox"], add=True, top=9)[0]
    assert {name for name, _ in added.classes} == {*colors.classes, "red fox"}
    assert sum(p for _, p in added.classes) == pytest.approx(1, abs=1e-5)
    replaced = Model.of(run, CLIP).answers(image, classes=["a", "b"], top=9)[0]
    assert {name for name, _ in replaced.classes} == {"a", "b"}


def test_evaluate_reports_calibration_errors_and_unknown_images(run: Path, colors: Colors) -> None:
    noise = Colors(classes=2, each=4, seed=9)
    found = evaluate(run, colors, unknown=noise, reject_share=0.2, backbone=CLIP)
    report = found.to_dict()
    assert report["ece"] == report["ece_trained"]
    assert report["ece_new"] is None
    rejection = found.rejection
    assert rejection is not None
    assert report["unknown"] == rejection.to_dict()
    assert 0 <= rejection.false_low <= rejection.false_acceptance <= rejection.false_high <= 1
    assert rejection.unknown == 8
    assert "AUROC" in rejection.sentence()


def test_without_calibration_nothing_changes_and_reject_says_why(tmp_path: Path, colors: Colors) -> None:
    adapt(colors, tmp_path / "run", method="linear-probe", backbone=CLIP, recipe=QUICK, calibrate=False)
    assert not (tmp_path / "run" / "calibration.json").exists()
    method = load_run(tmp_path / "run", CLIP)
    image = [colors.image(0)]
    raw = method.logits(torch.stack([CLIP.preprocess(i) for i in image])).softmax(-1)
    torch.testing.assert_close(Model(method).probabilities(image), raw)
    with pytest.raises(UsageError) as error:
        Model.of(tmp_path / "run", CLIP).answers(image, reject=0.05)
    assert error.value.hint == "calibrate"


def test_too_few_images_are_told(caplog: pytest.LogCaptureFixture) -> None:
    few = Colors(classes=3, each=1)
    trained = adapt(few, method="linear-probe", backbone=CLIP, recipe=QUICK)
    assert trained.calibration is None
    assert any(record.levelname == "WARNING" for record in caplog.records)


def test_a_damaged_calibration_is_refused(run: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "calibration.json").write_text('{"format": "dear calibration", "schema": 1, "modes": {"x": {}}}')
    with pytest.raises(RunError, match=r"calibration\.json.*temperature"):
        Model.load(copy, CLIP)


def test_the_classifier_refuses_with_a_label(colors: Colors) -> None:
    images = [colors.image(i) for i in range(24)]
    names = [colors.classes[label] for label in colors.labels]
    settings = {"method": "linear-probe", "backbone": CLIP, **QUICK}
    clf = Classifier(reject=0.3, **settings).fit(images, names)
    answers = clf.predict(images)
    assert set(answers) <= {*colors.classes, "none of these"}
    assert (answers == "none of these").tolist() == literal_refusals(clf.run_, images, 0.3)
    with pytest.raises(UsageError, match="reject"):
        Classifier(reject=0.7, **settings).fit(images, names)
    assert isinstance(clf.run_.calibration, Calibration)


def test_choose_compares_on_the_same_images_and_names_no_winner_in_the_noise(colors: Colors) -> None:
    methods = ("zeroshot", "linear-probe", "coop")
    found = choose(colors, methods=methods, recipe={"epochs": 2}, folds=2, backbone=CLIP)
    rows = found.to_dict()["methods"]
    assert [row["method"] for row in rows] == ["zeroshot", "linear-probe", "coop"]
    assert {row["trained"]["images"] for row in rows} == {24}
    assert rows[1]["new"] is None  # a linear probe cannot name new classes
    assert rows[0]["new"]["images"] == 24
    assert found.pick.title in found.sentence
    for row in rows:
        assert row["trained"]["low"] <= row["trained"]["accuracy"] <= row["trained"]["high"]


def test_choose_with_two_classes_one_image_or_no_time() -> None:
    settings: Any = {"recipe": {"epochs": 1}, "backbone": CLIP, "folds": 2}
    methods = ("zeroshot", "linear-probe")
    two = choose(Colors(classes=2, each=3), methods=methods, **settings)
    assert two.pick_for_new is None
    assert any("2 classes" in note for note in two.notes)
    with pytest.raises(UsageError, match="1e-06 minutes"):
        choose(Colors(classes=2, each=3), methods="zeroshot,coop", minutes=1e-6, **settings)
    with pytest.raises(DataError, match="colors"):
        choose(Colors(classes=3, each=1), methods=methods, **settings)
    with pytest.raises(UsageError, match=r"minutes .* 0"):
        choose(Colors(), minutes=0)


def test_choose_ends_in_time_and_says_what_a_method_needs(colors: Colors) -> None:
    """A slow method is refused by its estimate, or stopped at the deadline; the others are shown."""
    slow: Any = {"recipe": {"epochs": 100000, "batch": 4}}
    began = time.monotonic()
    found = choose(colors, methods="zeroshot,coop", folds=2, minutes=0.05, backbone=CLIP, **slow)
    assert time.monotonic() - began < 20  # three seconds, and what was begun
    skipped = found.candidates[1]
    assert skipped.trained is None
    assert skipped.skipped is not None
    assert re.search(r"\d+ (min|h)", skipped.skipped)
    assert found.minutes_needed is not None
    assert found.minutes_needed >= skipped.needed / 60
    assert found.pick.method == "zeroshot"


def test_a_winner_is_named_with_those_it_does_not_beat_significantly() -> None:
    def one(name: str, hits: int) -> Candidate:
        return Candidate(name, name, trained=torch.arange(100) < hits, seconds=1.0)

    best, near, far = one("Best", 90), one("Near", 88), one("Far", 60)
    said = Choice((best, near, far), best, None, (), 1.0).sentence
    assert "Best." in said
    assert "Near" in said
    assert "Far" not in said


def test_training_that_gains_nothing_is_not_recommended() -> None:
    def one(name: str, hits: int, seconds: float) -> Candidate:
        return Candidate(name, name, trained=torch.arange(1000) < hits, seconds=seconds)

    quick, slow, better = one("quick", 900, 1.0), one("slow", 905, 85.0), one("better", 950, 85.0)
    assert _best([quick, slow], "trained") is quick
    assert _best([quick, slow, better], "trained") is better


@pytest.mark.parametrize("seconds", [(0.4, 0.3), (0.3, 0.4)])
def test_methods_that_take_seconds_are_ordered_without_a_clock(seconds: tuple[float, float]) -> None:
    hits = torch.arange(100) < 90
    zeroshot, proker = (
        Candidate(name, name, trained=hits, seconds=each)
        for name, each in zip(("zeroshot", "proker"), seconds, strict=True)
    )
    assert _best([zeroshot, proker], "trained") is _best([proker, zeroshot], "trained") is zeroshot


def test_shared_views_train_as_a_trainings_own_views_and_as_images_do() -> None:
    from dear.runs.recipe import Recipe
    from dear.train.frozen import FrozenViews
    from dear.train.run import train

    images, rows = Colors(classes=3, each=4), torch.tensor([0, 2, 3, 5, 8, 9, 11])
    some = images.subset(rows.tolist())
    for name in ("dear", "prolip", "clip-lora"):
        recipe = Recipe(epochs=3, batch=4, views=2)
        for part, on, change in ((slice(None), images, {}), (rows, some, {"augment": False})):
            own = replace(recipe, **change)
            plain, quick = (candidate(name, images)[0] for _ in range(2))
            whole = FrozenViews(quick, images, own, 2)
            views = whole if isinstance(part, slice) else whole.subset(part)
            train(plain, on, own)
            train(quick, on, replace(own, views=0), views=views)
            for before, after in zip(plain.parameters(), quick.parameters(), strict=True):
                torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
            from_views = Model(quick).logits(on, frozen=views.inference())
            for mode, logits in Model(quick).logits(on).items():
                torch.testing.assert_close(from_views[mode], logits, rtol=1e-4, atol=1e-4)


def test_a_slow_method_is_calibrated_on_all_its_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dear.train import crossval
    from dear.train.calibrate import calibrate

    lessons: list[tuple[int, int]] = []
    before = crossval.train

    def counted(method: object, images: object, *args: object, **more: object) -> object:
        lessons.append((len(images), len(set(images.labels.tolist()))))
        return before(method, images, *args, **more)

    monkeypatch.setattr(crossval, "train", counted)
    images = Colors(classes=4, each=24)
    settings = {"epochs": 2, "batch": 32}
    method, recipe = candidate("coop", images, settings)
    found = calibrate(method, Trials(images, recipe))
    # Two thirds of the images, of all four classes; then of those of two of them.
    assert lessons == [(64, 4), (32, 2)]
    assert (found.folds, found.images, found.class_folds) == (1, 32, 1)
    assert found.modes["default"].auroc is not None
    lessons.clear()
    probe, recipe = candidate("linear-probe", images, settings)
    assert calibrate(probe, Trials(images, recipe)).images == 96
    assert len(lessons) == 10 + 2 * 3
    assert {count for count, classes in lessons if classes == 2} == {32}
