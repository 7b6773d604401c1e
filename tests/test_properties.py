"""What must not change the answers: order of images and classes, file names, copies, threads, moving the run.

docs/answers.md ("What does not matter") documents which answers these may change, and how far.
"""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import tiny_clip
from typer.testing import CliRunner

import dear
from dear.cli import build_app
from dear.data.open import open_data
from dear.runs.model import Model

EACH, CLASSES = 4, 4
#: Method -> how much a probability may move; most for those that are trained by steps.
QUICK = {
    "zeroshot": 1e-5, "linear-probe": 1e-5, "proker": 1e-4, "lp-plus-plus": 1e-4, "tip-adapter": 1e-5,
    "tip-adapter-f": 1e-4, "clip-adapter": 2e-3,
}  # fmt: skip
EPOCHS = {"tip-adapter-f": 2, "clip-adapter": 2}  #: without calibration, whose folds are those of the others
few = settings(
    max_examples=2, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
orders = given(st.permutations(range(EACH * CLASSES)), st.permutations(range(CLASSES)))


@pytest.fixture(scope="module")
def clip() -> dear.Clip:
    return tiny_clip(dtype=torch.float32)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Class -> files, and under "test" images of these classes."""
    root = tmp_path_factory.mktemp("photos")
    names = open_data("world:textures", "train").classes[:CLASSES]
    files: dict[str, list[Path]] = {}
    for split in ("train", "test"):
        task = open_data("world:textures", split).select_classes(names)
        for label, name in enumerate(names):
            places = (task.labels == label).nonzero()[:EACH, 0].tolist()
            folder = root / split / name
            folder.mkdir(parents=True)
            for number, place in enumerate(places):
                path = folder / f"{number}.png"
                task.image(place).save(path)
                files.setdefault("test" if split == "test" else name, []).append(path)
    return files


def fitted(
    clip: dear.Clip, name: str, photos: dict[str, list[Path]], order: list[int], classes: list[int]
) -> tuple[dear.Classifier, NDArray[np.float32]]:
    """A classifier trained on images and classes in some order, and its probabilities in the usual order."""
    names = [key for key in photos if key != "test"]
    listed = [names[place] for place in classes]
    pairs = [(path, listed.index(key)) for key in names for path in photos[key]]
    steps = EPOCHS.get(name)
    estimator = dear.Classifier(method=name, backbone=clip, epochs=steps, calibrate=steps is None)
    estimator.fit(
        [pairs[place][0] for place in order], [pairs[place][1] for place in order], class_names=listed
    )
    columns = [listed.index(key) for key in names]
    return estimator, estimator.predict_proba(photos["test"])[:, columns]


USUAL = list(range(EACH * CLASSES)), list(range(CLASSES))


@pytest.mark.parametrize("name", QUICK)
def test_the_order_of_images_and_classes_changes_nothing(
    clip: dear.Clip, photos: dict[str, list[Path]], name: str
) -> None:
    usual, expected = fitted(clip, name, photos, *USUAL)
    assert np.ptp(expected, axis=0).max() > 0.05

    @few
    @orders
    def check(order: list[int], classes: list[int]) -> None:
        other, probabilities = fitted(clip, name, photos, order, classes)
        np.testing.assert_allclose(probabilities, expected, atol=QUICK[name])
        for mode, one in (usual.run_.calibration.modes if usual.calibrate else {}).items():
            again = other.run_.calibration.modes[mode]
            np.testing.assert_allclose(again.temperature, one.temperature, rtol=1e-3)
            np.testing.assert_allclose(again.new_temperature, one.new_temperature, rtol=1e-3)
            assert other.run_.scale.threshold(0.2, mode).value == pytest.approx(
                usual.run_.scale.threshold(0.2, mode).value, abs=1e-2
            )

    check()


@few
@given(st.permutations(range(EACH * CLASSES)))
def test_the_order_of_questions_changes_nothing(
    clip: dear.Clip, photos: dict[str, list[Path]], order: list[int]
) -> None:
    estimator, expected = fitted(clip, "proker", photos, *USUAL)
    files = [photos["test"][place] for place in order]
    np.testing.assert_allclose(estimator.predict_proba(files), expected[order], atol=1e-6)


@few
@given(st.lists(st.text("abzäß🙂 +'-_(1)", min_size=1, max_size=8), min_size=16, max_size=16))
def test_names_of_files_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, clip: dear.Clip, photos: dict[str, list[Path]], stems: list[str]
) -> None:
    root, number = tmp_path_factory.mktemp("renamed"), count()
    plain = photos["test"][0].parents[2]
    shutil.copytree(plain / "test", root / "test")  # names decide what is held out where no split is named
    for path in sorted((plain / "train").rglob("*.png")):
        place = next(number)
        copy = root / "train" / path.parent.name / f"{stems[place]}{place}.png"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    first, second = (
        dear.adapt(data, method="linear-probe", backbone=clip, shots=None) for data in (plain, root)
    )
    files = [str(path) for path in photos["test"]]
    torch.testing.assert_close(second.probabilities(files), first.probabilities(files), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(QUICK.keys() - EPOCHS.keys()))
def test_copies_are_never_held_out_apart(clip: dear.Clip, photos: dict[str, list[Path]], name: str) -> None:
    double = {key: files if key == "test" else [*files, *files] for key, files in photos.items()}
    usual, expected = fitted(clip, name, photos, *USUAL)
    other, probabilities = fitted(clip, name, double, list(range(2 * EACH * CLASSES)), USUAL[1])
    assert other.run_.calibration.images == usual.run_.calibration.images
    assert len(other.run_.reference.labels) == len(usual.run_.reference.labels)
    assert other.run_.metrics["duplicates"]["copies"] == EACH * CLASSES
    if name == "zeroshot":
        np.testing.assert_allclose(probabilities, expected, atol=1e-6)


def test_where_the_run_is_and_threads_change_nothing(tmp_path: Path, photos: dict[str, list[Path]]) -> None:
    train = photos["test"][0].parents[2] / "train"
    files = [str(path) for path in photos["test"]]
    model = dear.adapt(train, tmp_path / "run", method="linear-probe", backbone="mini", shots=None)
    expected = model.probabilities(files).numpy()
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere" / "other name")
    shutil.rmtree(tmp_path / "run")
    run = str(tmp_path / "elsewhere" / "other name")
    answers = dear.predict(run, files, top=CLASSES)
    np.testing.assert_allclose(
        as_rows([dict(answer.classes) for answer in answers], model), expected, atol=1e-6
    )
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            words = ["predict", run, *files, "--top", str(CLASSES), "--json", "--threads", str(threads)]
            done = CliRunner().invoke(build_app(), words)
            assert done.exit_code == 0, done.output
            rows = [
                {one["name"]: one["probability"] for one in row["classes"]}
                for row in json.loads(done.stdout)["predictions"]
            ]
            np.testing.assert_allclose(as_rows(rows, model), expected, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def as_rows(rows: list[dict[str, float]], model: Model) -> NDArray[np.float64]:
    """Probabilities [n, C] in the order of the model's classes."""
    return np.array([[row[name] for name in model.classes] for row in rows])


@pytest.mark.parametrize("name", ["proker", "tip-adapter"])
def test_the_order_of_several_labels_changes_nothing(
    clip: dear.Clip, photos: dict[str, list[Path]], name: str
) -> None:
    names = [key for key in photos if key != "test"]
    files = [path for key in names for path in photos[key]]
    places = np.arange(EACH * CLASSES)
    targets = np.eye(CLASSES, dtype=int)[places // EACH]
    targets[::2] += np.roll(targets, 1, axis=1)[::2]  # every class has six images
    targets[0, 2] = targets[5, 3] = targets[9, 0] = targets[14, 1] = 1

    def answers(order: list[int], classes: list[int]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        estimator = dear.Classifier(method=name, backbone=clip)
        estimator.fit(
            [files[place] for place in order],
            targets[np.ix_(order, classes)],
            class_names=[names[place] for place in classes],
        )
        back = np.argsort(classes)
        thresholds = np.array(estimator.run_.calibration.modes["default"].thresholds)
        return estimator.predict_proba(photos["test"])[:, back], thresholds[back]

    probabilities, thresholds = answers(*USUAL)

    @few
    @orders
    def check(order: list[int], classes: list[int]) -> None:
        again, limits = answers(order, classes)
        np.testing.assert_allclose(again, probabilities, atol=1e-4)
        np.testing.assert_allclose(limits, thresholds, atol=1e-4)

    check()
