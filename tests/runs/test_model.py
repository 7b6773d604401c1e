"""What `Model` promises beside equal answers: groups, skipped images, refusals, other classes."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import Colors, tiny_clip
from typer.testing import CliRunner

import dear
from dear.calibration.calibration import Calibration, ModeCalibration
from dear.cli import build_app
from dear.data import open_data
from dear.data.images import FileImages, ListedImages
from dear.errors import DataError, InputError, RunError, TrainingError, UsageError
from dear.methods import build_method
from dear.runs.folder import write_calibration
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.train.run import train

CLIP = tiny_clip(dtype=torch.float32)
CLASSES = ("red", "green", "blue")
CALIBRATION = Calibration(modes={"default": ModeCalibration(1.5, logits=tuple(np.linspace(10, 40, 50)))})


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    colors = Colors(each=3)
    for number, label in enumerate(colors.labels.tolist()):
        path = tmp_path / "photos" / colors.classes[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        colors.image(number).save(path)
    return tmp_path / "photos"


def model(calibration: Calibration | None = CALIBRATION) -> Model:
    return Model(build_method("zeroshot", CLIP, CLASSES), calibration)


def grouped(photos: Path) -> FileImages:
    images = open_data(photos, "all")
    places = tuple(("beach", "forest", "city")[number % 3] for number in range(len(images)))
    return replace(images, groups=places)


@pytest.mark.parametrize("cached", [False, True])
def test_groups_are_measured_whether_or_not_images_are_skipped(photos: Path, cached: bool) -> None:
    images = grouped(photos)
    report = model().evaluate(images, cached=cached).to_dict()
    assert report["worst_group"]["groups"] == 9
    images.path(4).write_bytes(b"cut")
    skipped = model().evaluate(images, unreadable="skip", cached=cached)
    assert skipped.groups == tuple(
        f"{images.classes[images.labels[row]]}, {images.groups[row]}" for row in range(9) if row != 4
    )
    assert skipped.to_dict()["worst_group"]["groups"] == 8
    assert len(skipped.unreadable) == 1
    with pytest.raises(DataError, match=r"4\.png"):
        model().evaluate(images, cached=cached)


def test_the_command_reports_the_worst_group(photos: Path) -> None:
    images = grouped(photos)
    rows = zip(images.paths, images.labels.tolist(), images.groups or (), strict=True)
    lines = (f"photos/{path},{images.classes[label]},{group},test" for path, label, group in rows)
    table = photos.parent / "table.csv"
    table.write_text("\n".join(("path,label,group,split", *lines)))
    result = CliRunner().invoke(build_app(), ["zeroshot", "--data", str(table), "--json"])
    assert result.exit_code == 0, result.output
    worst = json.loads(result.stdout)["worst_group"]
    assert set(worst) == {"group", "accuracy", "groups"}
    assert worst["groups"] == 9


def test_the_threshold_of_trained_classes_is_not_used_for_new_ones(photos: Path) -> None:
    files = [str(path) for path in sorted(photos.rglob("*.png"))]
    assert all(answer.rejected is not None for answer in model().answers(files, reject=0.1))
    assert all(answer.rejected is None for answer in model().answers(files))
    mixed = model().answers(files, reject=0.1, classes=["fox"], add=True)
    assert all(answer.rejected is not None for answer in mixed)
    with pytest.raises(UsageError, match="fox"):
        model().answers(files, reject=0.1, classes=["fox", "owl"])
    with pytest.raises(UsageError, match="reject"):
        model(None).answers(files, reject=0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on mini, calibrated so that every image is accepted."""
    images = open_data("world:textures", "train")
    some = images.select_classes(images.classes[:3])
    folder = tmp_path_factory.mktemp("calibrated") / "run"
    method = build_method("zeroshot", dear.load("mini"), some.classes, template=some.template)
    train(method, some.subset(range(4)), Recipe.of(method, epochs=1), folder)
    calibration = ModeCalibration(1.0, logits=(-1e6,) * 50)
    write_calibration(folder, Calibration(modes={"default": calibration}))
    return folder


def test_columns_and_keys_do_not_depend_on_the_images(run: Path, photos: Path, tmp_path: Path) -> None:
    def columns(*words: str) -> list[str]:
        result = CliRunner().invoke(build_app(), ["predict", *words, "--csv", str(tmp_path / "a.csv")])
        assert result.exit_code == 0, result.output
        with (tmp_path / "a.csv").open() as file:
            return next(csv.reader(file))

    arguments = [str(run), str(photos), "--top", "1"]
    assert columns(*arguments) == columns(*arguments, "--reject")
    assert columns(*arguments) == ["image", "answer", "class_1", "probability_1", "rejected", "error"]
    for words, rejected in ((arguments, [None]), ([*arguments, "--reject"], [False])):
        result = CliRunner().invoke(build_app(), ["predict", *words, "--json"])
        rows = json.loads(result.stdout)["predictions"]
        assert {row["rejected"] for row in rows} == set(rejected)


def test_a_list_may_hold_files_and_images_and_names_what_cannot_be_read(photos: Path) -> None:
    files = sorted(photos.rglob("*.png"))
    opened = [Image.open(file) for file in files]
    torch.testing.assert_close(model().probabilities(files), model().probabilities(opened))
    assert model().probabilities([]).shape == (0, 3)
    bad = photos / "bad.png"
    bad.write_bytes(b"")
    with pytest.raises(InputError, match=r"bad\.png"):
        model().answers([files[0], bad])
    answers = model().answers([files[0], bad, files[1]], unreadable="skip", top=1)
    assert [answer.error is None for answer in answers] == [True, False, True]
    (alone,) = model().answers([files[1]], top=1)
    assert answers[2].classes[0] == (alone.classes[0][0], pytest.approx(alone.classes[0][1], abs=1e-5))
    assert model().probabilities([files[0], bad], unreadable="skip").isnan().any(dim=1).tolist() == [
        False,
        True,
    ]
    with pytest.raises(UsageError, match="ignore"):
        model().answers(files, unreadable="ignore")


def test_scores_that_are_no_numbers_are_refused(photos: Path) -> None:
    broken = build_method("coop", CLIP, CLASSES)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    with pytest.raises(TrainingError):
        Model(broken).evaluate(open_data(photos, "all"))


@dataclass
class Progress:
    calls: list[tuple[str, int, int | None]]

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        self.calls.append((stage, done, total))


def test_progress_ends_at_the_number_of_images(photos: Path) -> None:
    progress = Progress([])
    model().evaluate(open_data(photos, "all"), progress=progress)
    assert progress.calls[-1] == ("images", 9, 9)


def test_a_saved_model_is_the_same_model(run: Path, photos: Path, tmp_path: Path) -> None:
    loaded = Model.load(run)
    loaded.save(tmp_path / "copy", classifier={"mode": None})
    again = Model.load(tmp_path / "copy")
    assert again.identity == loaded.identity
    assert again.calibration == loaded.calibration
    assert again.metrics == loaded.metrics
    files = sorted(photos.rglob("*.png"))
    assert torch.equal(again.probabilities(files), loaded.probabilities(files))
    assert again.with_classes(template="one {}").identity != loaded.identity
    with pytest.raises(UsageError):
        Model(loaded.method).save(tmp_path / "other")


def other_backbones() -> dict[str, dear.Clip]:
    """Backbones with mini's visual weights that give other answers."""
    mini = dear.load("mini")
    plain = replace(mini.config, vision=replace(mini.config.vision, activation="quick_gelu"))
    configs = {"architecture": plain, "preprocessing": replace(mini.config, resize="squash")}
    clips = {name: dear.Clip(config, token_rows=len(mini.text.tokens)) for name, config in configs.items()}
    clips |= {"text tower": dear.load("mini"), "temperature": dear.load("mini")}
    for clip in clips.values():
        clip.load_state_dict(mini.state_dict())
    with torch.no_grad():
        clips["text tower"].text.tokens.mul_(1.5)
        clips["temperature"].log_scale.sub_(2)
    return clips


@pytest.mark.parametrize("what", ["architecture", "preprocessing", "text tower", "temperature"])
def test_a_run_refuses_another_backbone_with_the_same_visual_weights(run: Path, what: str) -> None:
    clip = other_backbones()[what]
    assert clip.fingerprint == dear.load("mini").fingerprint
    with pytest.raises(RunError, match="mini"):
        Model.load(run, clip)
    assert Model.load(run, clip, allow_other=True).clip is clip


def test_a_labeled_set_with_a_case_twin_of_a_trained_class_is_refused() -> None:
    images = Colors(each=2)
    model = Model(build_method("zeroshot", CLIP, images.classes))
    twins = ListedImages([images.image(0), images.image(2)], torch.tensor([0, 1]), ("Red", "green"))
    with pytest.raises(UsageError, match="'Red'"):
        model.evaluate(twins)
