"""Figures that a run reports about itself, on a folder in which a quarter of the images are copies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from dear.bench.protocols.held_out import split_sources
from dear.data.duplicates import find_duplicates
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.tasks.adapt import adapt
from dear.tasks.choose.task import choose
from dear.tasks.drift import compare, drift
from dear.tasks.evaluate import held_out_accuracy

EACH, CLASSES = 18, 4


def resave(image: Image.Image, path: Path) -> None:
    image.save(path.with_suffix(".jpg"), quality=90)


def mirror(image: Image.Image, path: Path) -> None:
    ImageOps.mirror(image).save(path)


def resize(image: Image.Image, path: Path) -> None:
    image.resize((54, 54)).save(path)


CHANGES: tuple[Callable[[Image.Image, Path], None], ...] = (resave, mirror, resize)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder without copies; with copies, two of each class with equal content and four changed."""
    root = tmp_path_factory.mktemp("folders")
    task = open_data("world:textures", "train")
    task = task.select_classes(task.classes[:CLASSES])
    for label, name in enumerate(task.classes):
        places = [place for place, other in enumerate(task.labels.tolist()) if other == label][:EACH]
        for kind in ("plain", "copies"):
            (root / kind / name).mkdir(parents=True)
            for number, place in enumerate(places):
                task.image(place).save(root / kind / name / f"{number}.png")
        for number in range(0, EACH, 3):
            original, copy = (root / "copies" / name / f"{number}{end}.png" for end in ("", " (copy)"))
            if number < 6:
                shutil.copy(original, copy)
            else:
                CHANGES[number // 3 % 3](task.image(places[number]), copy)
    return {kind: root / kind for kind in ("plain", "copies")}


@pytest.fixture(scope="module")
def fresh() -> ImageSet:
    """Images of the same classes that are in no folder."""
    images = open_data("world:textures", "test")
    return images.select_classes(images.classes[:CLASSES]).subset(range(0, 48 * CLASSES, 2))


def test_figures_are_true_with_and_without_copies(
    folders: dict[str, Path], fresh: ImageSet, tmp_path: Path
) -> None:
    figures, counts = {}, {}
    for kind, folder in folders.items():
        model = adapt(folder, tmp_path / kind, method="linear-probe")
        evaluation = model.evaluate(fresh, scores=True)
        truth, scores = evaluation.accuracy["default"], evaluation.scores["default"]
        held = held_out_accuracy(model.method, open_data(folder, "test"))
        limit = model.scale.threshold(0.05, "default")
        low, high = limit.among(len(fresh))
        (candidate,) = choose(folder, methods=("linear-probe",)).candidates
        names = ["x"] * len(fresh)
        error = model.calibration.modes["default"].ece_after
        figures[kind] = {
            "held-out accuracy": held.after["default"] - truth,
            "accuracy of choose": float(candidate.trained.double().mean()) - truth,
            "calibration error": error - evaluation.calibration_errors()["ece"],
            "far": compare(model.reference, model.features(fresh), names, names).far - 0.05,
        }
        refused = float((scores < limit.value).double().mean())
        assert low <= refused <= high, kind
        counts[kind] = (held.images, len(candidate.trained), limit.images)
        duplicates = json.loads((tmp_path / kind / "metrics.json").read_text())["duplicates"]
        assert bool(duplicates["copies"]) == bool(duplicates["near"]) == (kind == "copies")
    tolerance = {"held-out accuracy": 0.2, "accuracy of choose": 0.12, "calibration error": 0.1, "far": 0.1}
    for kind, values in figures.items():
        assert all(abs(values[name]) < most for name, most in tolerance.items()), (kind, values)
    for plain, copied in zip(counts["plain"], counts["copies"], strict=True):
        assert copied <= 1.1 * plain, counts  # with copies a third more; a few resized ones are not found


def test_the_validation_part_of_source_domains_holds_no_copies_of_training_images(
    folders: dict[str, Path],
) -> None:
    table = folders["copies"].parent / "domains.csv"
    files = sorted(folders["copies"].rglob("*.*"))
    names = [(file.parent.name, file.name) for file in files]
    rows = [f"copies/{label}/{name},{label},d{len(name) % 2}" for label, name in names]
    table.write_text("\n".join(["path,label,domain", *rows]))
    images = open_data(table, "all")
    unit = dict(zip((images.key(i) for i in range(len(images))), find_duplicates(images).units, strict=True))
    for seed in (1, 2, 3):
        sides = [{unit[part.key(i)] for i in range(len(part))} for part in split_sources(images, seed)]
        assert sides[1]
        assert not sides[0] & sides[1]


def test_drift_counts_copies_once(folders: dict[str, Path], tmp_path: Path) -> None:
    model = adapt(folders["plain"], tmp_path / "run", method="linear-probe")
    results = {kind: drift(model, [folder]) for kind, folder in folders.items()}
    assert results["plain"].distinct == results["plain"].images == EACH * CLASSES
    assert results["copies"].images == EACH * CLASSES * 4 // 3
    assert results["copies"].distinct <= 1.1 * EACH * CLASSES  # a few resized copies are not found
    assert abs(results["copies"].p - results["plain"].p) < 0.1
