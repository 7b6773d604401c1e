"""What must not change the answers: order of images and classes, file names, copies, threads, moving the run.

docs/answers.md ("What does not matter") documents which answers these may change, and how far.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_method import TASK, build
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import shallow_mini, tiny_clip
from typer.testing import CliRunner

import dear
from dear.cli import build_app
from dear.clip.checkpoint import save_hf
from dear.data.images import ListedImages
from dear.data.open import open_data
from dear.export.onnx import export_onnx
from dear.export.runtime import OnnxModel
from dear.methods import METHODS
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.tasks.audit.task import audit
from dear.tasks.choose.task import choose
from dear.tasks.drift import drift
from dear.tasks.evaluate import evaluate
from dear.tasks.explain.task import explain
from dear.train.run import train

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
            assert other.run_.calibrator.threshold(0.2, mode).value == pytest.approx(
                usual.run_.calibrator.threshold(0.2, mode).value, abs=1e-2
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


# -- every method: an answer depends on the image and its class, not on what else is asked


@cache
def trained(name: str) -> Model:
    """A method after one step on a tiny backbone."""
    method = build(name)
    return train(method, TASK, Recipe.of(method, epochs=1, batch=6))


@pytest.mark.parametrize("name", METHODS)
def test_answers_do_not_depend_on_other_images_or_the_order_of_classes(name: str) -> None:
    model = trained(name)
    images = [TASK.image(place) for place in range(6)]
    expected = model.probabilities(images)

    @few
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.permutations(range(len(TASK.classes))))
    def check(places: list[int], classes: list[int]) -> None:
        other = model
        if model.method.open_classes:
            other = model.with_classes([TASK.classes[label] for label in classes])
        else:
            classes = list(range(len(classes)))
        answers = other.probabilities([images[place] for place in places])
        torch.testing.assert_close(answers, expected[places][:, classes], atol=1e-5, rtol=0)

    check()


# -- every surface

Surface = Callable[[Path, list[Path]], NDArray[np.float64]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, photos: dict[str, list[Path]]) -> Path:
    """A calibrated run on a backbone of six layers, and its export beside it."""
    root = tmp_path_factory.mktemp("surfaces")
    save_hf(shallow_mini(), root / "backbone")
    folder = photos["test"][0].parents[2] / "train"
    model = dear.adapt(folder, root / "run", method="linear-probe", backbone=root / "backbone", shots=None)
    export_onnx(model, root / "model.onnx")
    return root / "run"


def in_class_order(run: Path, rows: list[Any]) -> NDArray[np.float64]:
    return as_rows([dict(row) for row in rows], Model.load(run))


def by_command(run: Path, files: list[Path]) -> NDArray[np.float64]:
    words = ["predict", str(run), *map(str, files), "--top", str(CLASSES), "--json"]
    answers = json.loads(CliRunner().invoke(build_app(), words).stdout)["predictions"]
    return in_class_order(run, [[(one["name"], one["probability"]) for one in a["classes"]] for a in answers])


def by_predict(run: Path, files: list[Path]) -> NDArray[np.float64]:
    return in_class_order(run, [one.classes for one in dear.predict(run, files, top=CLASSES)])


def by_classifier(run: Path, files: list[Path]) -> NDArray[np.float64]:
    return dear.Classifier.load(run).predict_proba(files)


def by_evaluate(run: Path, files: list[Path]) -> NDArray[np.float64]:
    """Answer and confidence of each image."""
    labels, classes = torch.zeros(len(files), dtype=torch.int64), Model.load(run).classes
    result = evaluate(run, ListedImages(tuple(files), labels, classes))
    answers, confidence = result.answers["default"].numpy(), result.confidence["default"].numpy()
    return np.stack([answers, confidence], axis=1)


def by_service(run: Path, files: list[Path]) -> NDArray[np.float64]:
    from fastapi.testclient import TestClient

    from dear.serve.app import make_app
    from dear.serve.service import Service

    sent = [("files", (file.name, file.read_bytes())) for file in files]
    with TestClient(make_app(Service(run.parent, Model.load(run).clip))) as client:
        reply = client.post(f"/v1/models/{run.name}/classify", files=sent, data={"top": str(CLASSES)})
    rows = [[(one["name"], one["probability"]) for one in a["classes"]] for a in reply.json()["answers"]]
    return in_class_order(run, rows)


def by_onnx(run: Path, files: list[Path]) -> NDArray[np.float64]:
    answers = OnnxModel(run.parent / "model.onnx").predict([str(file) for file in files], top=CLASSES)
    return in_class_order(run, [one.classes for one in answers])


def by_explain(run: Path, files: list[Path]) -> NDArray[np.float64]:
    """Probabilities, and the lead of the answer as the sum of its bars."""
    items = explain(run, [str(file) for file in files])
    rows = in_class_order(run, [one.probabilities for one in items])
    return np.hstack([rows, [[sum(bar.lead for bar in one.bars)] for one in items]])


SURFACES: tuple[Surface, ...] = (
    by_command, by_predict, by_classifier, by_evaluate, by_service, by_onnx, by_explain,
)  # fmt: skip


@pytest.mark.parametrize("surface", SURFACES)
def test_an_answer_depends_on_the_image_alone(
    run: Path, photos: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory, surface: Surface
) -> None:
    """Neither on the order of the images, nor on copies among them, nor on names, nor on where the run is."""
    files = photos["test"]
    expected = surface(run, files)

    @few
    @given(
        st.lists(st.integers(0, len(files) - 1), min_size=5, max_size=10),
        st.lists(st.text("abzäß🙂 +'-_(1)", min_size=1, max_size=8), min_size=10, max_size=10),
    )
    def check(places: list[int], stems: list[str]) -> None:
        root = tmp_path_factory.mktemp("moved")
        shutil.copytree(run, root / "another name")
        shutil.copy(run.parent / "model.onnx", root)
        renamed = [root / f"{stems[number]}{number}.png" for number in range(len(places))]
        for path, place in zip(renamed, places, strict=True):
            shutil.copy(files[place], path)
        np.testing.assert_allclose(surface(root / "another name", renamed), expected[places], atol=1e-5)

    check()


def drift_figures(run: Path, folder: Path) -> list[float]:
    result = drift(run, [str(folder)])
    return [result.far, result.far_p, result.p]


def audit_figures(run: Path, folder: Path) -> dict[str, float]:
    return {f"{one.name}, {one.verdict}": one.strength for one in audit(run, folder).findings}


def choose_figures(run: Path, folder: Path) -> list[float]:
    choice = choose(folder, methods=("proker", "linear-probe"), backbone=Model.load(run).clip, shots=0)
    return [float(one.trained.double().mean()) for one in choice.candidates]


@pytest.mark.parametrize("figures", [drift_figures, audit_figures, choose_figures])
def test_figures_of_a_folder_do_not_depend_on_names(
    run: Path,
    photos: dict[str, list[Path]],
    tmp_path_factory: pytest.TempPathFactory,
    figures: Callable[[Path, Path], Any],
) -> None:
    """Names of files decide their order; the folder and the run are somewhere else, too."""
    plain = photos["test"][0].parents[2]
    expected = figures(run, plain)

    @few
    @given(st.permutations(range(EACH * CLASSES)))
    def check(order: list[int]) -> None:
        root = tmp_path_factory.mktemp("renamed")
        shutil.copytree(run, root / "run")
        for split in ("train", "test"):
            for number, path in zip(order, sorted((plain / split).rglob("*.png")), strict=True):
                copy = root / "photos" / split / path.parent.name / f"{number}.png"
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
        assert figures(root / "run", root / "photos") == pytest.approx(expected, abs=1e-5)

    check()
