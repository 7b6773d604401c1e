"""`dear audit`, `dear repair` and `--without` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dear
from dear.cli import build_app
from dear.data import few_shot
from dear.data.world_images import world_task
from dear.runs.folder import load_run
from dear.runs.model import Model
from dear.shortcuts.without import Without, remove_concepts
from dear.tasks.adapt import adapt
from dear.tasks.audit.held_out import without
from dear.tasks.repair import repair


def call(*words: str) -> dict:
    result = CliRunner().invoke(build_app(), [*words, "--json"])
    assert result.exit_code == 0, result.output or result.exception
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linear probe on six animals, each at a place of its own."""
    out = tmp_path_factory.mktemp("audit") / "run"
    adapt("world:shortcut-place", out, method="linear-probe", shots=6, recipe={"epochs": 5, "lr": 0.03})
    return out


def test_audit_of_data_names_the_planted_concept() -> None:
    report = call("audit", "--data", "world:shortcut-color@0.9", "--shots", "16")
    assert report["suspected"] == ["Color"]
    assert report["findings"][0]["verdict"] == "associated"
    assert sum(map(sum, report["findings"][0]["images"])) == 96
    assert call("audit", "--data", "world:shortcut-none", "--shots", "16")["suspected"] == []


def test_audit_of_a_run_and_its_repair(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "audit.html"
    words = ("--concept", "location", "--concept", "color", "--out", str(page))
    report = call("audit", str(run), "--shots", "6", *words)
    assert report["suspected"] == ["Location"]
    rows = {row["name"]: row for row in report["findings"]}
    assert rows["Location"]["answers_changed"] > 0.1  # on test images, which are at all places
    assert report["held_out"] == 300
    assert "worst_group" in report
    assert 'href="audit-why.html#image-1"' in page.read_text()
    assert 'id="image-1"' in (tmp_path / "audit-why.html").read_text()
    background = "background: beach, forest, snow, city, space, desert"
    assert call("audit", str(run), "--shots", "6", "--concept", background)["suspected"] == ["background"]
    monkeypatch.chdir(tmp_path)
    done = call("repair", str(run), "--without", "location", "--way", "heads", "--no-compare")
    assert "Location" in done["removed"]
    assert not done["folds_into_weights"]
    assert done["run"] == f"{run.name}-repaired"
    loaded = load_run(tmp_path / done["run"])
    assert loaded.clip.correction is not None
    assert [list(head) for head in loaded.clip.correction.heads] == done["heads"]


def test_a_repair_is_compared_with_random_heads(run: Path) -> None:
    test = world_task("shortcut-place", "test").subset(range(0, 720, 7))
    done = repair(run, Without(("location",), "heads"), test=test)
    assert done.comparison is not None
    report = done.comparison.to_dict()
    assert report["repaired"]["accuracy"] > report["untouched"]["accuracy"] + 0.1
    assert report["repaired"]["accuracy"] > report["random"]["mean"]["accuracy"] + 0.1
    assert len(report["random"]["draws"]) == 5
    assert 0.05 < report["answers_changed"] < 1
    assert Model(done.trained.method).evaluate(test).to_dict()["accuracy"] == report["repaired"]["accuracy"]


def test_a_removal_is_kept_by_export_and_zeroshot(tmp_path: Path) -> None:
    data, out, plain = tmp_path / "places", tmp_path / "run", tmp_path / "plain"
    for split in ("train", "test"):
        images = few_shot(world_task("shortcut-place", split), 4, 1)
        for index, label in enumerate(images.labels.tolist()):
            path = data / split / images.classes[label] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            images.image(index).save(path)
    removal = ("--data", str(data), "--without", "location", "--way", "words")
    fixed = call("zeroshot", *removal)
    assert "Location" in fixed["removed"]
    call("adapt", *removal, "--method", "zeroshot", "--shots", "0", "--out", str(out))
    result = CliRunner().invoke(build_app(), ["export", str(out), "--merged", str(plain)])
    assert result.exit_code == 0, result.output
    merged = call("zeroshot", "--data", str(data), "--backbone", str(plain))
    assert merged["per_class"] == fixed["per_class"]


def test_examples_stand_for_a_concept_without_words(tmp_path: Path) -> None:
    images = world_task("shortcut-place", "test")
    for value in ("beach", "forest", "snow", "city", "space", "desert"):
        (tmp_path / "places" / value).mkdir(parents=True)
        chosen = [index for index, group in enumerate(images.groups or ()) if group == value][::25]
        for index in chosen:
            images.image(index).save(tmp_path / "places" / value / f"{index}.png")
    clip, training = dear.load("mini"), few_shot(world_task("shortcut-place", "train"), 8, 1)
    settings = Without(("scenery",), "examples", {"scenery": tmp_path / "places"})
    removal = remove_concepts(clip, training, settings)
    assert removal.removal.title == "scenery by examples (5 directions)"
    leace = remove_concepts(clip, training, Without(("scenery",), "leace", {"scenery": tmp_path / "places"}))
    assert leace.removal.rank == 5
    chosen = remove_concepts(clip, training, Without.of("location", examples=tmp_path / "places"))
    assert chosen.choices["location"].way in chosen.choices["location"].scores


def test_removing_twice_composes(run: Path) -> None:
    """Auditing a repaired run removes the concept from what is left, not from the plain backbone."""
    model = Model.of(run)
    method = model.method
    images = few_shot(world_task("shortcut-place", "train"), 4, 1)
    words = remove_concepts(method.clip, images, Without(("color",), "words")).removal
    heads = remove_concepts(method.clip, images, Without(("location",), "heads")).removal
    both = without(without(model, heads), words).clip.correction
    assert both is not None
    pixels = torch.randn(4, 3, 64, 64)
    step = method.clip.with_correction(heads.correction()).encode_image(pixels)
    expected = step - (step - words.center) @ words.removed
    assert torch.allclose(method.clip.with_correction(both).encode_image(pixels), expected, atol=1e-4)
    assert without(without(model, heads), heads).clip.correction.heads == heads.heads  # type: ignore[union-attr]


def test_classifier_without(tmp_path: Path) -> None:
    clf = dear.Classifier(method="tip-adapter", shots=4, without="location")
    clf.fit("world:shortcut-place")
    assert clf.method_.clip.correction is not None
    clf.save(tmp_path / "run")
    loaded = dear.Classifier.load(tmp_path / "run")
    assert loaded.method_.clip.correction is not None
    assert loaded.method_.clip.correction.digest == clf.method_.clip.correction.digest


@pytest.mark.parametrize(
    ("words", "item"),
    [
        (("audit",), "run or data"),
        (("audit", "--data", "world:shortcut-place", "--concept", "smell"), "smell"),
        (("zeroshot", "--data", "world:shortcut-place", "--without", "smell"), "smell"),
        (("zeroshot", "--data", "world:shortcut-place", "--way", "words"), "without"),
        (("zeroshot", "--data", "world:shortcut-place", "--without", "color", "--way", "magic"), "magic"),
        (
            ("zeroshot", "--data", "world:shortcut-place", "--without", "emotion", "--way", "examples"),
            "examples",
        ),
        (("zeroshot", "--data", "world:shortcut-place", "--without", "animal", "--way", "heads"), "head"),
        (
            ("zeroshot", "--data", "world:shortcut-place", "--without", "color", "--examples", "/nowhere"),
            "/nowhere",
        ),
    ],
)
def test_wrong_uses(words: tuple[str, ...], item: str) -> None:
    result = CliRunner().invoke(build_app(), list(words))
    assert result.exit_code != 0
    assert item in str(result.exception) + result.output


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of drawn animals as files; training images of the second class are dark."""
    from PIL import ImageEnhance

    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 8), ("test", 3)):
        images = few_shot(world_task("shortcut-none", split), count, 1)
        for index, label in enumerate(images.labels.tolist()):
            image = images.image(index)
            if split == "train" and label == 1:
                image = ImageEnhance.Brightness(image).enhance(0.2)
            folder = root / split / images.classes[label]
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{index}.png")
    return root


def test_a_dark_class_is_found_tested_by_edits_and_repaired(photos: Path, tmp_path: Path) -> None:
    report = call("audit", "--data", str(photos))
    (dark,) = report["findings"]
    assert dark["kind"] == "property"
    assert dark["without"] == "brightness"
    assert dark["look"] in ("dark", "without highlights")
    assert report["suspected"] == [dark["name"]]
    assert "--without brightness" in report["next"][0]
    run = tmp_path / "run"
    adapt(photos, run, method="linear-probe", recipe={"epochs": 5, "lr": 0.03}, calibrate=False)
    report = call("audit", str(run), "--concept", "color")
    (dark,) = (one for one in report["findings"] if one["kind"] == "property")
    assert dark["edits"]["images"] == 15
    assert dark["suspected"] == (dark["name"] in report["suspected"]) == dark["edits"]["relies"]
    words = ("--without", "brightness", "--way", "copies", "--out", str(tmp_path / "new"))
    done = call("repair", str(run), *words)
    assert "brightness" in done["removed"]
    assert f"predicted as {dark['class']}" in done["untouched"]
    assert done["verdict"]
    again = call(
        "repair", str(run), *words[:2], "--way", "directions", "--no-compare", "--out", str(tmp_path / "two")
    )
    assert "brightness" in again["removed"]
    assert load_run(tmp_path / "two").clip.correction is not None
