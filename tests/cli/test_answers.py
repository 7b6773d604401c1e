"""`dear choose`, `predict --reject`, added classes and `evaluate --unknown`, as a user types them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from dear.cli import build_app

COLORS = {"red": (200, 30, 30), "green": (30, 180, 40), "blue": (30, 40, 210), "gray": (120, 120, 120)}


def dear(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(build_app(), list(words))
    return done.exit_code, f"{done.stdout}{done.exception or ''}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """photos/{train,test}/COLOR/n.png, others/n.png, and a calibrated run."""
    folder = tmp_path_factory.mktemp("answers")
    for split in ("train", "test"):
        for name, color in COLORS.items():
            for number in range(5):
                file = folder / "photos" / split / name / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                shift = 6 * number + 3 * (split == "test")
                Image.new("RGB", (64, 64), tuple(min(255, c + shift) for c in color)).save(file)
    (folder / "others").mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64), (255, 255 - number, 0)).save(folder / "others" / f"{number}.png")
    words = ("--method", "clip-adapter", "--epochs", "2", "--out", str(folder / "run"))
    status, output = dear("adapt", "--data", str(folder / "photos"), *words)
    assert status == 0, output
    return folder


def test_predict_refuses_and_adds_classes(place: Path) -> None:
    image = str(place / "photos" / "test" / "red" / "0.png")
    status, output = dear("predict", str(place / "run"), image, "--classes", "+yellow, orange", "--json")
    assert status == 0, output
    ranked = json.loads(output)["predictions"][0]["classes"]
    assert len(ranked) == 5
    status, output = dear(
        "predict", str(place / "run"), image, "--classes", "+yellow", "--top", "9", "--json"
    )
    names = {one["name"] for one in json.loads(output)["predictions"][0]["classes"]}
    assert names == {*COLORS, "yellow"}
    images = [str(path) for path in sorted((place / "photos" / "test").rglob("*.png"))]
    share = ("--reject", "--reject-share", "0.5")
    status, output = dear("predict", str(place / "run"), *images, *share, "--json")
    assert status == 0, output
    refused = [one["rejected"] for one in json.loads(output)["predictions"]]
    status, output = dear("predict", str(place / "run"), *images, *share)
    assert output.count("none of these") == sum(refused)


@pytest.mark.parametrize(
    ("lines", "expected", "exported"),
    [
        ("\ufeff+yellow\r\norange\r\n", {*COLORS, "yellow", "orange"}, True),
        ("yellow\n\n+red\n", {*COLORS, "yellow"}, False),
        ("\ufeffred\r\n\r\nyellow", {"red", "yellow"}, False),
    ],
)
def test_predict_and_export_read_the_same_list(
    place: Path, tmp_path: Path, lines: str, expected: set[str], exported: bool
) -> None:
    """One export is enough: all surfaces read lists by the function of tests/runs/test_class_lists.py."""
    (tmp_path / "names.txt").write_bytes(lines.encode())
    image, listed = str(place / "photos/test/red/0.png"), lines.lstrip("\ufeff").replace("\r", "")
    answers, onnx = [], str(tmp_path / "model.onnx")
    for words in (("--classes-file", str(tmp_path / "names.txt")), ("--classes", listed.replace("\n", ","))):
        status, output = dear("predict", str(place / "run"), image, *words, "--top", "9", "--json")
        assert status == 0, output
        answers.append(json.loads(output)["predictions"][0]["classes"])
    if exported:
        status, output = dear("export", str(place / "run"), "--onnx", onnx, *words, "--json")
        assert status == 0, output
        status, output = dear("predict", "--onnx", onnx, image, "--top", "9", "--json")
        answers.append(json.loads(output)["predictions"][0]["classes"])
    assert {one["name"] for one in answers[0]} == expected
    for other in answers[1:]:
        assert [one["name"] for one in other] == [one["name"] for one in answers[0]]
        probabilities = [one["probability"] for one in answers[0]]
        assert [one["probability"] for one in other] == pytest.approx(probabilities, abs=1e-4)


@pytest.mark.parametrize("command", ["predict", "export"])
def test_names_that_clip_cannot_distinguish_are_refused(place: Path, tmp_path: Path, command: str) -> None:
    image = str(place / "photos/test/red/0.png")
    words = (image,) if command == "predict" else ("--onnx", str(tmp_path / "x.onnx"))
    status, output = dear(command, str(place / "run"), *words, "--classes", "yellow, +Red")
    assert status != 0
    assert "'red' and 'Red'" in output
    assert not list(tmp_path.iterdir())


def test_columns_and_keys_do_not_depend_on_the_images(place: Path, tmp_path: Path) -> None:
    images = [str(path) for path in sorted((place / "photos" / "test").rglob("*.png"))]
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    columns, keys, classes = set(), set(), {}
    for name, words in {"plain": (), "refused": ("--reject", "--reject-share", "0.5")}.items():
        table = tmp_path / f"{name}.csv"
        status, output = dear(
            "predict", str(place / "run"), *images, str(broken), *words, "--csv", str(table)
        )
        assert status == 1, output  # one image cannot be read
        rows = list(csv.DictReader(table.open()))
        columns.add(tuple(rows[0]))
        classes[name] = [row["answer"] for row in rows]
        assert all((row["answer"] == "none of these") == (row["rejected"] == "yes") for row in rows)
        assert all(row["class_1"] in COLORS and float(row["probability_1"]) > 0 for row in rows[:-1])
        assert rows[-1]["error"]
        status, output = dear("predict", str(place / "run"), images[0], *words, "--json")
        keys.add(tuple(json.loads(output)["predictions"][0]))
    assert len(columns) == len(keys) == 1
    assert "none of these" in classes["refused"]
    assert "none of these" not in classes["plain"]


def test_evaluate_with_unknown_images(place: Path) -> None:
    words = ("--data", str(place / "photos"), "--unknown", str(place / "others"))
    status, output = dear("evaluate", str(place / "run"), *words, "--json")
    assert status == 0, output
    report = json.loads(output)
    assert 0 <= report["ece"] <= 1
    assert report["ece_new"] is None
    assert report["unknown"]["unknown"] == 4
    assert 0 <= report["unknown"]["auroc"] <= 1
    status, output = dear("evaluate", str(place / "run"), *words)
    assert "calibration error:" in output
    assert "AUROC" in output


def test_choose_recommends_and_adapts(place: Path, tmp_path: Path) -> None:
    words = ("choose", "--data", str(place / "photos"), "--methods", "zeroshot,linear-probe,clip-adapter")
    status, output = dear(*words, "--folds", "2", "--adapt", "--out", str(tmp_path / "run"), "--json")
    assert status == 0, output
    report = json.loads(output.splitlines()[0])
    assert [row["method"] for row in report["methods"]] == ["zeroshot", "linear-probe", "clip-adapter"]
    assert report["pick"] in {"zeroshot", "linear-probe", "clip-adapter"}
    assert report["recommendation"]
    assert (tmp_path / "run" / "config.json").exists()
    status, output = dear("choose", "--data", str(place / "photos"), "--adapt")
    assert status != 0
    assert "--out" in output
