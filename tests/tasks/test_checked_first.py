"""Wrong options are refused before the work; results are told before anything can lose them."""

from __future__ import annotations

import json
from pathlib import Path

import food
import pytest
import torch
from PIL import Image
from tiny import Colors, mixed_roles, tiny_clip
from typed import dear

from dear.classifier import Classifier
from dear.data.open import BENCHMARKS
from dear.errors import DiskError, UsageError
from dear.tasks import adapt as adapting
from dear.tasks.adapt import adapt
from dear.tasks.choose.task import choose
from dear.tasks.evaluate import evaluate
from dear.tasks.retrieve import gallery_of, retrieve

CLIP = tiny_clip(dtype=torch.float32)


def never(*args: object, **options: object) -> None:
    raise AssertionError("the work began")


def test_a_wrong_mode_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting, "fit", never)
    with pytest.raises(UsageError, match="'fast'"):
        Classifier(backbone=CLIP, roles=mixed_roles(), mode="fast").fit(Colors())


def test_a_wrong_mode_is_refused_before_evaluation() -> None:
    method = adapt(Colors(), backbone=CLIP, method="zeroshot", calibrate=False).method
    images = Colors()
    images.pixels = never
    with pytest.raises(UsageError, match="'fast'"):
        evaluate(method, images, mode="fast")


def test_a_folder_that_cannot_be_written_does_not_lose_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, run = str(food.photos(tmp_path / "food", 2)), str(tmp_path / "run")
    assert dear("adapt", "--data", photos, "--out", run, "--method", "zeroshot")[0] == 0

    def full(*args: object, **options: object) -> None:
        raise DiskError("run/metrics.json: no space left")

    monkeypatch.setattr("dear.tasks.evaluate.add_metrics", full)
    told: list[object] = []
    monkeypatch.setattr("dear.cli.evaluate.print_json", told.append)
    status, said = dear("evaluate", run, "--data", photos, "--json")
    assert status == 0
    assert 0 <= told[0]["accuracy"] <= 1
    assert "run/metrics.json" in said


def test_adapt_takes_values_of_the_recipe(tmp_path: Path) -> None:
    words = ["adapt", "--data", str(food.photos(tmp_path / "food", 2)), "--out", str(tmp_path / "run")]
    words += ["--method", "linear-probe"]
    words += ["--recipe", "epochs=1", "--recipe", "lr=0.5", "--recipe", "scale=0.9,1"]
    assert dear(*words)[0] == 0
    recipe = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert (recipe["epochs"], recipe["lr"], recipe["scale"]) == (1, 0.5, [0.9, 1.0])


def test_presets_and_values_live_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from dear.methods import Preset, find_method
    from dear.runs.spec import Spec
    from dear.train.setup.prepare import prepare

    presets = {"quick": Preset("for a test", {"beta": 0.5}, {"epochs": 2, "batch": 4})}
    monkeypatch.setattr(find_method("dear"), "presets", presets, raising=False)
    changes = {"recipe": {"epochs": 7}, "options": {"text_tokens": 2}}
    spec = Spec(data="world:textures", shots=1, preset="quick", **changes)
    found = prepare(spec).spec
    assert (found.options["beta"], found.options["text_tokens"]) == (0.5, 2)
    assert (found.recipe["epochs"], found.recipe["batch"]) == (7, 4)
    with pytest.raises(UsageError, match="'slow'"):
        prepare(spec.changed(preset="slow"))


def test_benchmarks_are_galleries(tmp_path: Path) -> None:
    known = BENCHMARKS["EuroSAT"]
    home = tmp_path / known.folder
    rows = {"train": [], "val": [], "test": []}
    for split in rows:
        for label, name in enumerate(("Forest", "River")):
            path = home / "2750" / name / f"{split}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (30, 90 * label, 60)).save(path)
            rows[split].append([f"{name}/{split}.png", label, name])
    (home / "split_zhou_EuroSAT.json").write_text(json.dumps(rows))
    gallery = gallery_of("EuroSAT", root=tmp_path)
    assert [Path(gallery.key(i)).name for i in range(len(gallery))] == ["test.png", "test.png"]
    model = adapt(Colors(), backbone=CLIP, roles=mixed_roles(), shots=1, recipe={"epochs": 1}).method
    found = retrieve(
        model, query=Colors().image(0), gallery="EuroSAT", by="features", data_root=tmp_path, top=1
    )
    assert len(found[0].keys) == 1


def test_a_gallery_holds_every_kind_of_image_that_data_does(tmp_path: Path) -> None:
    for name in ("a.jpe", "b.pgm", "c.png", ".hidden.png", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert [Path(key).name for key in gallery_of(tmp_path).items] == ["a.jpe", "b.pgm", "c.png"]


def test_classes_from_a_file(tmp_path: Path) -> None:
    from dear.cli.options import read_class_list

    (tmp_path / "names.txt").write_text("tabby cat\n\n red fox, or so \n")
    assert read_class_list(None, tmp_path / "names.txt") == ["tabby cat", "red fox, or so"]
    assert read_class_list("a, b", None) == ["a", "b"]
    assert read_class_list(None, None) is None


def test_choose_trains_the_recommended_method_with_the_same_texts() -> None:
    images = Colors(classes=2)
    texts = {name: [f"{name} on a plate."] for name in images.classes}
    settings = {"backbone": CLIP, "methods": "zeroshot", "texts": texts, "adapt": True, "minutes": 5}
    run = choose(images, **settings).run
    assert run is not None
    assert {name: list(some) for name, some in run.method.prompts.texts.sentences.items()} == texts
