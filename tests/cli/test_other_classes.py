"""Test images of other classes than the trained ones, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from dear.cli import build_app

COLORS = {"red": (200, 30, 30), "green": (30, 180, 40), "blue": (30, 40, 210), "gray": (120, 120, 120)}


def dear(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(build_app(), list(words))
    return done.exit_code, f"{done.output}{done.exception or ''}"


def paint(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(4):
            color = tuple(channel + 6 * number for channel in COLORS[name])
            Image.new("RGB", (64, 64), color).save(folder / name / f"{number}.png")


@pytest.mark.parametrize("method", ["linear-probe", "coop"])
@pytest.mark.parametrize("data", ["photos", "photos/train"])
def test_a_test_folder_with_other_classes_is_refused_before_training(
    tmp_path: Path, data: str, method: str
) -> None:
    paint(tmp_path / "photos/train", "red", "green", "blue")
    paint(tmp_path / "photos/test", "red", "green", "gray")
    run = tmp_path / "run"
    status, said = dear("adapt", "--data", str(tmp_path / data), "--method", method, "--out", str(run))
    assert status != 0
    assert "'gray'" in said
    assert not run.exists()


def test_a_probe_counts_what_it_learned_and_names_new_classes(tmp_path: Path) -> None:
    paint(tmp_path / "photos/train", "red", "green", "blue")
    paint(tmp_path / "photos/test", "red", "green")
    paint(tmp_path / "others", "red", "gray")
    run = str(tmp_path / "run")
    words = ("--method", "linear-probe", "--no-calibrate", "--without", "color", "--way", "words")
    status, said = dear("adapt", "--data", str(tmp_path / "photos/train"), *words, "--out", run)
    assert status == 0, said
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    width = 128  # of the features of mini
    assert metrics["trainable_parameters"] == 3 * (width + 1)
    assert f"{3 * (width + 1)} learned parameters" in said
    before = next(entry["zero_shot"] for name, entry in metrics.items() if name.endswith("(held out)"))
    status, said = dear("zeroshot", "--data", str(tmp_path / "photos"), "--json")
    assert before == pytest.approx(json.loads(said[said.index("{") :])["accuracy"])
    status, said = dear("evaluate", run, "--data", str(tmp_path / "others"), "--split", "all")
    assert status != 0
    assert "'gray'" in said
    assert "'red'" not in said
