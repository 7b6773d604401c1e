"""Figures that a run reports about itself, on a folder with copied, re-saved and mirrored images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import ImageOps

from dear.data.open import open_data
from dear.workflows.adapt import adapt
from dear.workflows.choose import choose
from dear.workflows.drift import compare
from dear.workflows.evaluate import held_out_accuracy

EACH, CLASSES = 12, 6


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


@pytest.mark.parametrize("kind", ["copies", "changed"])
def test_figures_are_those_without_copies(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    fresh = open_data("world:textures", "test")
    fresh = fresh.select_classes(fresh.classes[:CLASSES])
    figures, runs = {}, {}
    for each in ("plain", kind):
        model = adapt(folders[each], tmp_path / each, method="linear-probe")
        held = held_out_accuracy(model.method, open_data(folders[each], "test")).after["default"]
        known = model.calibration.modes["default"]
        scores = model.evaluate(fresh, scores=True).scores["default"]
        refused = float((scores < model.threshold(0.05, "default").value).double().mean())
        names = ["x"] * len(fresh)
        far = compare(model.reference, model.features(fresh), names, names).far
        chosen = choose(folders[each], methods=("linear-probe",), spec=model.spec)
        accuracy = float(chosen.candidates[0].trained.double().mean())
        figures[each] = (held, known.ece_after, refused, far, accuracy)
        runs[each] = json.loads((tmp_path / each / "metrics.json").read_text())["duplicates"]
    copies = runs[kind]["copies"] + runs[kind]["near"]
    assert runs["plain"]["copies"] == runs["plain"]["near"] == 0
    assert copies > 0
    assert runs[kind]["images"] - copies <= runs["plain"]["images"] + CLASSES
    tolerance = (0.25, 0.1, 0.1, 0.1, 0.12)
    for plain, copied, most in zip(figures["plain"], figures[kind], tolerance, strict=True):
        assert abs(plain - copied) < most, figures
