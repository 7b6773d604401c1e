"""Classes that are added to a run from a few photos, without training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dear
from dear.cli import build_app
from dear.data.images import ListedImages
from dear.errors import UsageError
from dear.methods.tensors import unit
from dear.runs.model import Model
from dear.tasks.extend import HALF, class_means

OLD, NEW = ("dog", "cat", "bird", "fish"), ("horse", "snake")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extend") / "run"
    images = dear.open_data("world:fauna", "train").select_classes(OLD)
    dear.adapt(images, folder, method="zeroshot", shots=8)
    return folder


def photos(count: int) -> dear.ImageSet:
    images = dear.open_data("world:fauna", "train").select_classes(NEW)
    return images.subset(
        [row for label in (0, 1) for row in (images.labels == label).nonzero()[:count, 0].tolist()]
    )


def test_a_new_class_moves_toward_its_photos(run: Path, tmp_path: Path) -> None:
    model = Model.load(run)
    extended = dear.extend(run, photos(5), tmp_path / "more")
    assert extended.classes == (*OLD, *NEW)
    assert extended.trained == (True,) * 4 + (False,) * 2
    features = unit(model.features(photos(5)))
    reference = model.reference
    assert reference is not None
    center = class_means(reference.unit, reference.labels).mean(dim=0)
    text = unit(model.clip.encode_text([model.template.replace("{}", "horse")]))[0]
    expected = unit(text + 5 / (5 + HALF) * (features[:5].mean(dim=0) - center))
    assert torch.allclose(extended.method.prompts.frozen[4], expected, atol=1e-5)
    again = Model.load(tmp_path / "more")
    test = dear.open_data("world:fauna", "test").select_classes((*OLD, *NEW)).subset(range(0, 300, 25))
    assert torch.equal(extended.probabilities(test), again.probabilities(test))
    assert again.trained == extended.trained
    assert extended.method.adapter_state().keys() == model.method.adapter_state().keys()


def test_photos_help_more_than_the_name(run: Path) -> None:
    test = dear.open_data("world:fauna", "test").select_classes((*OLD, *NEW))
    named = Model.load(run).with_classes(NEW, add=True).evaluate(test)
    shown = dear.extend(run, photos(5)).evaluate(test)
    assert shown.accuracy["default"] > named.accuracy["default"]


def test_copies_of_photos_change_nothing(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    some = photos(3)
    double = some.subset([*range(6), 0, 0, 1, 5])
    usual, extended = dear.extend(run, some), dear.extend(run, double)
    assert torch.allclose(extended.method.prompts.frozen, usual.method.prompts.frozen, atol=1e-6)
    assert len(extended.reference.labels) == len(usual.reference.labels)
    assert extended.spec.extended == {"horse": 3, "snake": 3}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    trained = dear.open_data("world:fauna", "train").select_classes(OLD)
    row = drawn_rows(run, trained)[0]
    items = (trained.image(row), *(some.image(place) for place in range(3)))
    dear.extend(run, ListedImages(items, torch.zeros(4, dtype=torch.int64), ("horse",)))
    assert "1 of 4" in caplog.text
    assert trained.classes[int(trained.labels[row])] in caplog.text


def drawn_rows(run: Path, images: dear.ImageSet) -> list[int]:
    """Places of the images that a run was trained on."""
    reference = Model.load(run).reference
    nearest = unit(Model.load(run).features(images)) @ reference.unit.T
    return (nearest.amax(dim=1) > 1 - 1e-6).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("option", [("--seed", "2"), ("--no-check",), ("--tree", "t.json"), ("--shots", "0")])
def test_options_without_effect_are_named(run: Path, tmp_path: Path, option: tuple[str, ...]) -> None:
    words = ["adapt", "--extend", str(run), "--data", "world:fauna", "--out", str(tmp_path / "more")]
    done = CliRunner().invoke(build_app(), [*words, *option])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith(option[0].replace("--no-check", "--check"))
    assert not (tmp_path / "more").exists()


def test_what_cannot_be_extended(run: Path, tmp_path: Path) -> None:
    old = dear.open_data("world:fauna", "train").select_classes(OLD)
    with pytest.raises(UsageError, match="'dog'"):
        dear.extend(run, old)
    closed = dear.adapt(old, method="linear-probe", shots=4)
    with pytest.raises(UsageError, match="linear-probe"):
        dear.extend(closed, photos(1))
    uncalibrated = dear.adapt(old, method="zeroshot", shots=4, calibrate=False)
    with pytest.raises(UsageError, match="calibrat"):
        dear.extend(uncalibrated, photos(1))
