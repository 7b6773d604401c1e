"""Figures that a run reports about itself, on a folder with copied, re-saved and mirrored images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import ImageOps

from dear.data.open import open_data
from dear.tasks.adapt import adapt
from dear.tasks.choose import choose
from dear.tasks.drift import compare
from dear.tasks.evaluate import held_out_accuracy

EACH, CLASSES = 12, 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder without copies, one with a copy of every second image, one with a third changed copies."""
    root = tmp_path_factory.mktemp("folders")
    task = open_data("world:textures", "train")
    task = task.select_classes(task.classes[:CLASSES])
    for name in task.classes:
        places = [place for place, label in enumerate(task.labels.tolist()) if task.classes[label] == name]
        for kind in ("plain", "copies", "changed"):
            (root / kind / name).mkdir(parents=True)
        for number, place in enumerate(places[:EACH]):
            image, file = task.image(place), f"{number}.png"
            for kind in ("plain", "copies", "changed"):
                image.save(root / kind / name / file)
            if number % 2 == 0:
                shutil.copy(root / "copies" / name / file, root / "copies" / name / f"{number} (copy).png")
            if number % 3 == 0:
                other = (ImageOps.mirror(image), image.resize((54, 54)))[number % 2]
                other.save(root / "changed" / name / f"{number} (2).png")
    return {kind: root / kind for kind in ("plain", "copies", "changed")}


def test_figures_are_those_without_copies(folders: dict[str, Path], tmp_path: Path) -> None:
    fresh = open_data("world:textures", "test")
    fresh = fresh.select_classes(fresh.classes[:CLASSES]).subset(range(0, 48 * CLASSES, 4))
    figures, duplicates = {}, {}
    for kind, folder in folders.items():
        model = adapt(folder, tmp_path / kind, method="linear-probe")
        held = held_out_accuracy(model.method, open_data(folder, "test")).after["default"]
        scores = model.evaluate(fresh, scores=True).scores["default"]
        refused = float((scores < model.scale.threshold(0.05, "default").value).double().mean())
        names = ["x"] * len(fresh)
        far = compare(model.reference, model.features(fresh), names, names).far
        (candidate,) = choose(folder, methods=("linear-probe",)).candidates
        accuracy = float(candidate.trained.double().mean())
        figures[kind] = (held, model.calibration.modes["default"].ece_after, refused, far, accuracy)
        duplicates[kind] = json.loads((tmp_path / kind / "metrics.json").read_text())["duplicates"]
    assert duplicates["plain"]["copies"] == duplicates["plain"]["near"] == duplicates["copies"]["near"] == 0
    assert duplicates["copies"]["copies"] > EACH
    assert duplicates["changed"]["near"] > EACH // 2
    tolerance = (0.3, 0.1, 0.1, 0.1, 0.12)
    for kind in ("copies", "changed"):
        for plain, copied, most in zip(figures["plain"], figures[kind], tolerance, strict=True):
            assert abs(plain - copied) < most, figures
