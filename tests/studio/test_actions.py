"""What the studio's tabs do, without a browser."""

import json
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from studio_state import backbone, images, model, roles, state

from dear.calibration.calibration import Calibration, ModeCalibration
from dear.data import open_data
from dear.data.images import even_subset
from dear.errors import DataError, DearError, InputError, RoleError, RunError, UsageError
from dear.methods import ZeroShot
from dear.runs.folder import load_run
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.studio import compare as comparing
from dear.studio.classify import (
    BEFORE,
    MOST_IMAGES,
    REJECT,
    can_reject,
    classify,
    notices,
    open_uploads,
    parse_classes,
    readable_uploads,
    verdicts_html,
)
from dear.studio.compare import FROZEN, compare_models, model_names
from dear.studio.heads import HeadViewer, describe_html, first_key, map_html, overlay, parse_key
from dear.studio.retrieve import ImageSearch, attributes
from dear.studio.state import Stopped, open_state
from dear.studio.training import Trainer, status_html

EVIL = "<img src=x onerror=alert(1)>"


# --- the state ------------------------------------------------------------------------------------------


def training(data, epochs=10, backbone="", **changes):
    return Spec().changed(data=data, recipe={"epochs": epochs}, backbone=backbone, **changes)


def test_without_a_run_the_frozen_backbone_answers_and_nothing_is_trained_or_discovered(
    tmp_path, monkeypatch
):
    def forbidden(*args, **options):
        raise AssertionError("roles were discovered")

    monkeypatch.setattr("dear.heads.discover.discover_roles", forbidden)
    opened = open_state(tmp_path)
    opened.roles = None  # as for a backbone without a known role map
    assert not opened.trained
    assert not opened.models
    assert opened.model.classes == tuple(opened.images.classes)
    verdict = classify(opened, [("a.png", opened.images.image(0))], opened.model.classes, "a {}.")[0]
    assert list(verdict.answers) == ["default"]
    assert notices(opened.model, opened.model.classes, 0.05)[0][1] == "Train"


def test_data_of_the_user_replaces_the_tasks_of_the_world(tmp_path):
    pytest.importorskip("gradio", reason="the extra `studio` is not installed")
    from dear.studio.tabs.train import datasets

    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        Image.new("RGB", (30, 20), "red").save(tmp_path / "photos" / label / "1.png")
    data = str(tmp_path / "photos")
    opened = open_state(tmp_path, data=data)
    assert opened.model.classes == ("cat", "dog")
    assert datasets(opened) == [data]
    assert all(name.startswith("world:") for name in datasets(open_state(tmp_path)))


def test_a_missing_run_is_named(tmp_path):
    with pytest.raises(DearError, match="nothing"):
        open_state(tmp_path, run=str(tmp_path / "nothing"))


def test_discovery_of_roles_can_be_stopped_and_blocks_no_model(tmp_path):
    fresh = state(tmp_path, trained=False)
    fresh.roles = None

    def stop(what, done, total):
        assert fresh.lock.acquire(blocking=False)
        raise Stopped

    with pytest.raises(Stopped):
        fresh.find_roles(stop)
    assert fresh.roles is None


def test_names_of_models_never_repeat(tmp_path, monkeypatch):
    monkeypatch.setattr("dear.studio.state.MOST_MODELS", 3)
    opened = state(tmp_path)
    for _ in range(5):
        opened.use(model(), "again")
    assert list(opened.models) == ["4. again", "5. again", "6. again"]


# --- heads ---------------------------------------------------------------------------------------------


def test_the_map_has_a_button_a_head_with_its_role_in_words():
    html = map_html(roles(), (12, 3))
    assert html.count("<button") == len(roles())
    assert 'data-head="12-3" aria-pressed="true"' in html
    assert html.count('aria-pressed="true"') == 1
    assert "layer 12, head 3:" in html


def test_a_head_is_shown_with_images_and_its_attention(tmp_path):
    viewer = HeadViewer(state(tmp_path))
    key = first_key(roles())
    view = viewer.view(key)
    assert view.role == roles()[key]
    assert len(view.most) == len(view.attention) == len(view.least) == 6
    assert view.attention[0][0].size == (224, 224)
    assert f"Layer {key[0]}, head {key[1]}" in describe_html(view)
    assert viewer.attention(key, Image.new("RGB", (300, 100), "red")).size == (224, 224)


def test_other_images_of_the_studio_are_looked_at_anew(tmp_path):
    opened = state(tmp_path)
    viewer, key = HeadViewer(opened), first_key(roles())
    before = [name for _, name in viewer.view(key).most]
    opened.images = open_data("world:textures", "test").subset(range(0, 300, 10))
    after = [name for _, name in viewer.view(key).most]
    assert set(after) <= set(opened.images.classes)
    assert before != after


def test_the_overlay_is_brightest_where_the_head_looks():
    look = torch.zeros(8, 8)
    look[1, 6] = 1.0
    seen = np.asarray(overlay(Image.new("RGB", (64, 64), (120, 120, 120)), look)).astype(int).sum(axis=2)
    row, column = np.unravel_index(seen.argmax(), seen.shape)
    assert 28 <= row < 56
    assert 168 <= column < 196


def test_heads_that_do_not_exist_are_refused():
    with pytest.raises(UsageError, match="twelve"):
        parse_key("twelve", roles())
    with pytest.raises(RoleError):
        parse_key("1-0", roles())


# --- classify ------------------------------------------------------------------------------------------


def test_answers_equal_the_methods_and_images_pass_the_tower_once(tmp_path, monkeypatch):
    opened = state(tmp_path)
    shown = [("one.png", images().image(0)), ("two.png", images().image(9))]
    classes = ["car", "house", "red star", "beach"]  # two of them never trained
    passes, tower = [], type(backbone().visual)
    embed = tower.embed
    monkeypatch.setattr(
        tower, "embed", lambda self, pixels: passes.append(len(pixels)) or embed(self, pixels)
    )
    verdicts = classify(opened, shown, classes, "a photo of a {}.")
    monkeypatch.undo()
    assert passes == [2]
    batch = torch.stack([backbone().preprocess(image) for _, image in shown])
    other = model().with_classes(classes, "a photo of a {}.")
    frozen = ZeroShot(backbone(), classes, template="a photo of a {}.")
    wanted = {**other.all_logits(batch), BEFORE: frozen.logits(batch)}
    for row, verdict in enumerate(verdicts):
        assert list(verdict.answers) == ["fused", "decoupled", BEFORE]
        for mode, logits in wanted.items():
            best = logits[row].softmax(-1).max(-1)
            assert verdict.answers[mode][0][0] == classes[int(best.indices)]
            assert verdict.answers[mode][0][1] == pytest.approx(float(best.values), abs=1e-5)


def test_names_of_images_and_classes_are_escaped(tmp_path):
    verdicts = classify(state(tmp_path), [(EVIL, images().image(0))], [EVIL, "car"], "a {}.")
    html = verdicts_html(verdicts)
    assert "<img src=x" not in html
    assert "&lt;img src=x" in html


def test_notices_name_classes_that_were_not_trained():
    trained = list(model().classes)
    assert notices(Model(model()), trained, None) == []
    ((sentence, _),) = notices(Model(model()), [*trained, "zeppelin"], None)
    assert "zeppelin" in sentence
    assert notices(Model(model()), trained, 0.05)[0][1] == "Train"  # no calibration: cannot reject


def test_images_of_no_class_are_rejected_with_the_nearest_class(tmp_path):
    shown, classes, template = [("one.png", images().image(0))], list(model().classes), model().template
    assert not can_reject(Model(model()), classes)
    with pytest.raises(UsageError):
        classify(state(tmp_path), shown, classes, template, reject=0.1)
    high = {"fused": ModeCalibration(temperature=2.0, logits=(1e6,) * 40)}
    low = {"decoupled": ModeCalibration(temperature=2.0, logits=(-1e6,) * 40)}
    opened = state(tmp_path)
    opened.use(Model(model(), Calibration(modes={**high, **low})), "a calibrated model")
    assert can_reject(opened.model, classes)
    assert not can_reject(opened.model, ["a", "b"])
    verdict = classify(opened, shown, classes, template, reject=REJECT)[0]
    assert verdict.rejected == ("fused",)
    pixels = torch.stack([backbone().preprocess(shown[0][1])])
    probability = (model().logits(pixels, "fused") / 2).softmax(-1).max()
    assert verdict.answers["fused"][0][1] == pytest.approx(float(probability), abs=1e-5)
    html = verdicts_html([verdict], [("Look.", "Train")], ["b.png: unreadable"])
    assert html.count("none of these") == 1
    assert verdict.answers["fused"][0][0] in html
    assert 'data-tab="Train"' in html
    assert "b.png" in html
    assert not classify(opened, shown, classes, template)[0].rejected


def test_one_unreadable_file_is_one_sentence_among_answers(tmp_path):
    images().image(0).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_text("no image")
    good, bad = str(tmp_path / "good.png"), str(tmp_path / "bad.png")
    found, complaints = readable_uploads([bad, good])
    assert [name for name, _ in found] == ["good.png"]
    assert len(complaints) == 1
    assert complaints[0].startswith("bad.png: ")
    for paths in ([bad], [bad, bad], [], [good] * (MOST_IMAGES + 1)):
        with pytest.raises(InputError):
            readable_uploads(paths)


def test_an_unreadable_file_does_not_lift_the_limit_on_pixels(tmp_path, monkeypatch):
    monkeypatch.setattr("dear.studio.classify.MAX_PIXELS", 1000)
    Image.new("RGB", (30, 20)).save(tmp_path / "large.png")
    (tmp_path / "bad.png").write_text("no image")
    large, bad = str(tmp_path / "large.png"), str(tmp_path / "bad.png")
    for paths in ([large, large], [bad, large, large]):
        with pytest.raises(InputError, match=r"large\.png"):
            readable_uploads(paths)


def test_class_names_are_read_from_lines_and_commas():
    assert parse_classes(" cat \ndog,\n", []) == ("cat", "dog")
    with pytest.raises(UsageError, match="got 1"):
        parse_classes("cat", [])
    with pytest.raises(UsageError, match="2,000"):
        parse_classes("\n".join(f"class {n}" for n in range(2000)), [])


def test_a_file_that_is_no_image_is_named_without_its_folder(tmp_path):
    path = tmp_path / "secret" / "note.png"
    path.parent.mkdir()
    path.write_text("hello")
    with pytest.raises(InputError) as caught:
        open_uploads([str(path)])
    assert str(caught.value).startswith("note.png: ")
    assert "secret" not in str(caught.value)
    with pytest.raises(InputError, match="got 0"):
        open_uploads([])
    with pytest.raises(InputError, match=f"got {MOST_IMAGES + 1}"):
        open_uploads([str(path)] * (MOST_IMAGES + 1))


# --- retrieve ------------------------------------------------------------------------------------------


def test_the_query_itself_is_nearest_and_others_follow_by_cosine(tmp_path):
    search = ImageSearch(state(tmp_path))
    found = search.find(images().image(5), "color", top=4)
    cosines = [cosine for _, _, cosine in found]
    assert cosines[0] == pytest.approx(1.0, abs=1e-4)
    assert cosines == sorted(cosines, reverse=True)
    features = torch.nn.functional.normalize(
        model().attribute_features(torch.stack([backbone().preprocess(images().image(i)) for i in (5, 6)])),
        dim=-1,
    )
    own = model().attribute_index("color")
    wanted = float(features[0, own] @ features[1, own])
    every = [cosine for _, _, cosine in search.find(images().image(5), "Color", top=100)]
    assert min(abs(wanted - cosine) for cosine in every) < 1e-4


def test_a_folder_can_be_searched_here_but_not_from_other_computers(tmp_path):
    gallery = tmp_path / "gallery"
    gallery.mkdir()
    for number in range(3):
        images().image(number * 7).save(gallery / f"{number}.png")
    found = ImageSearch(state(tmp_path)).find(images().image(7), "shape", str(gallery), top=2)
    assert found[0][1] == "1.png"
    with pytest.raises(UsageError, match="gallery"):
        ImageSearch(state(tmp_path, local=False)).find(images().image(7), "shape", str(gallery))
    with pytest.raises(DataError, match="none"):
        ImageSearch(state(tmp_path)).find(images().image(7), "shape", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="smell"):
        ImageSearch(state(tmp_path)).find(images().image(7), "smell")


def test_a_backbone_with_roles_is_searched_by_its_heads(tmp_path):
    opened = state(tmp_path, trained=False)
    assert "Color" in attributes(opened)
    nearest = ImageSearch(opened).find(images().image(5), "Color", top=3)
    assert [cosine for *_, cosine in nearest] == sorted((cosine for *_, cosine in nearest), reverse=True)
    opened.roles = None
    assert attributes(opened) == []


# --- train ---------------------------------------------------------------------------------------------


def test_a_training_is_stopped_resumed_finished_and_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("dear.studio.training._TESTED", 12)
    monkeypatch.setattr("dear.tasks.evaluate.MOST_IMAGES", 12)
    opened = state(tmp_path)
    trainer = Trainer(opened)
    with pytest.raises(RunError):
        trainer.download()
    plan = training("world:vehicles", shots=1, epochs=3, calibrate=False)
    trainer.start(plan)
    with pytest.raises(UsageError):
        trainer.start(plan)
    while trainer.status.step < 1 and trainer.status.busy:
        time.sleep(0.02)
    trainer.stop()
    stopped = trainer.status
    assert stopped.state == "stopped", stopped.message
    assert 0 < stopped.step < stopped.steps
    trainer.resume()
    done = trainer.wait(120)
    assert done.state == "finished", done.message
    assert done.step == done.steps
    assert done.lines[-1]["step"] == done.steps
    assert opened.model.classes == load_run(trainer.run, backbone=opened.clip).classes
    assert done.accuracy[-1][1].keys() == {"fused", "decoupled"}
    result, test = done.result, open_data("world:vehicles", "test")
    assert result.used == len(opened.model.classes)
    assert result.available == len(open_data("world:vehicles", "train"))
    assert result.accuracy.available == len(test)
    frozen = ZeroShot(opened.clip, test.classes, template=test.template)
    assert result.accuracy.before == Model(frozen).evaluate(even_subset(test, 12)).accuracy["default"]
    assert f"{result.available - result.used} were left out" in status_html(done)
    again = open_state(tmp_path, run=str(trainer.run))
    assert again.model.classes == opened.model.classes
    assert again.images.name == "world:vehicles"
    with zipfile.ZipFile(trainer.download()) as archive:
        assert {Path(name).name for name in archive.namelist()} == {
            path.name for path in trainer.run.iterdir()
        }
        assert not any("/" in name.removeprefix("run/") or ".." in name for name in archive.namelist())
        assert json.loads(archive.read("run/config.json"))["method"] == "dear"


def test_measuring_accuracy_while_training_leaves_the_trained_method_alone():
    """A recorded step holds tensors of the method's prompts: an evaluation has a binding of its own."""
    trained = model()
    before = (trained.clip, trained.prompts, trained._cache, dict(trained._cache))
    Model(trained).evaluate(
        open_data("world:vehicles", "test").select_classes(trained.classes).subset(range(4))
    )
    assert trained.clip is before[0]
    assert trained.prompts is before[1]
    assert trained._cache is before[2]
    assert trained._cache == before[3]


def test_nothing_to_train_on_is_a_sentence(tmp_path):
    trainer = Trainer(state(tmp_path))
    for plan, message in (
        (training(""), "Images"),
        (training(str(tmp_path / "none")), "none"),
        (training("world:nowhere"), "nowhere"),
        (training("world:vehicles", epochs=0), "epochs"),
    ):
        with pytest.raises(DearError, match=message):
            trainer.start(plan)
    with pytest.raises(UsageError):
        trainer.resume()
    assert trainer.status.state == "idle"
    with pytest.raises(UsageError, match=str(tmp_path)):
        Trainer(state(tmp_path, local=False)).start(training(str(tmp_path)))


def test_a_training_takes_another_backbone_and_roles(tmp_path, monkeypatch):
    monkeypatch.setattr("dear.studio.training._TESTED", 12)
    monkeypatch.setattr("dear.tasks.evaluate.MOST_IMAGES", 12)
    opened = state(tmp_path)
    opened.roles.save(tmp_path / "roles.json")
    trainer = Trainer(opened)
    with pytest.raises(DearError, match=r"none\.json"):
        trainer.start(training("world:vehicles"), str(tmp_path / "none.json"))
    with pytest.raises(UsageError, match="ViT-B-16"):
        Trainer(state(tmp_path, local=False)).start(training("world:vehicles", backbone="ViT-B-16"))
    before = opened.version
    for choice, kinds in (("all heads mixed", {"mixed"}), (str(tmp_path / "roles.json"), {"core", "other"})):
        trainer.start(training("world:vehicles", shots=1, epochs=1, calibrate=False), choice)
        done = trainer.wait(120)
        assert done.state == "finished", done.message
        assert kinds <= {role.kind for _, role in opened.model.method.roles}
    assert opened.version == before + 2
    assert opened.images.name == "world:vehicles"


def test_only_who_began_a_training_may_stop_it_on_an_open_studio(tmp_path):
    trainer = Trainer(state(tmp_path, local=False))
    trainer.owner = "anna"
    assert trainer.may_stop("anna")
    assert not trainer.may_stop("ben")
    assert Trainer(state(tmp_path)).may_stop("ben")


# --- visitors ------------------------------------------------------------------------------------------


def test_stop_ends_the_work_of_one_visitor_only():
    pytest.importorskip("gradio", reason="the extra `studio` is not installed")
    from dear.studio.parts import Work

    work = Work()
    anna = work.callback(lambda *args, **options: None, "anna")
    ben = work.callback(lambda *args, **options: None, "ben")
    work.stop("anna")
    with pytest.raises(Stopped):
        anna("images", 1, 2)
    ben("images", 1, 2)
    again = work.callback(lambda *args, **options: None, "anna")
    again("images", 1, 2)
    work.stop("nobody")
    again("images", 2, 2)


def test_an_error_takes_the_place_of_answers():
    pytest.importorskip("gradio", reason="the extra `studio` is not installed")
    from dear.studio.parts import errors_as_output

    def ask(wrong):
        if wrong:
            raise DearError(EVIL)
        return ["answers", "plot"]

    asked = errors_as_output(ask, lambda problem: [problem, None])
    assert asked(False) == ["answers", "plot"]
    problem, plot = asked(True)
    assert plot is None
    assert "&lt;img src=x" in problem
    assert 'role="alert"' in problem


# --- compare -------------------------------------------------------------------------------------------


def test_two_models_are_compared_on_the_same_images(tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "_TESTED", 40)
    opened = state(tmp_path)
    names = model_names(opened)
    assert names == [FROZEN, "1. a model of the tests"]
    html = compare_models(opened, names[0], names[1], "world:vehicles")
    data = open_data("world:vehicles", "test")
    step = -(-len(data) // 40)
    some = data.subset(range(0, len(data), step))
    mode = "fused"
    right = Model(model().with_classes(some.classes)).evaluate(some)
    frozen = Model(ZeroShot(backbone(), some.classes, template=some.template)).evaluate(some)
    now, then = right.answers[mode] == some.labels, frozen.answers["default"] == some.labels
    assert f"by the second model only: {int((now & ~then).sum())}" in html
    assert f"by the first model only: {int((then & ~now).sum())}" in html
    assert f"{100 * frozen.accuracy['default']:.1f}" in html
    with pytest.raises(UsageError):
        compare_models(opened, names[0], names[0], "")
    with pytest.raises(DearError, match="none"):
        compare_models(opened, names[0], str(tmp_path / "none"), "")
    with pytest.raises(UsageError, match=str(tmp_path)):
        compare_models(state(tmp_path, local=False), FROZEN, str(tmp_path), "")


def test_an_image_is_written_once_for_everybody(tmp_path):
    pytest.importorskip("gradio", reason="the extra `studio` is not installed")
    from dear.studio.parts import image_file  # needs gradio

    own = state(tmp_path)
    red, same, blue = (Image.new("RGB", (30, 20), color) for color in ("red", "red", "blue"))
    first = image_file(own, red)
    before = Path(first).stat()
    assert image_file(own, same) == first
    assert Path(first).stat().st_ino == before.st_ino
    assert Path(first).stat().st_mtime_ns == before.st_mtime_ns
    assert image_file(own, blue) != first
    with Image.open(first) as image:
        assert image.size == (30, 20)
