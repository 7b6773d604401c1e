"""The commands as a user meets them: help, answers, JSON, wrong use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs
from PIL import Image
from typed import run as dear

from dear.cli import COMMANDS, HIDDEN, PANELS
from dear.heads.roles import RoleMap


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of class folders: red and blue squares, 64 pixels."""
    folder = tmp_path_factory.mktemp("photos")
    for name, color in (("red", (210, 30, 30)), ("blue", (30, 60, 210))):
        for number in range(6):
            place = folder / name / f"{number}.png"
            place.parent.mkdir(exist_ok=True)
            tone = tuple(max(0, min(255, c + 5 * number)) for c in color)
            Image.new("RGB", (64, 64), tone).save(place)
    return folder


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    done = dear("adapt", "--data", str(photos), "--out", str(out), "--epochs", "2", "--shots", "4")
    assert done.returncode == 0, done.stderr
    return out


def test_help_lists_every_command_and_needs_no_torch() -> None:
    code = "from dear.cli import main; import atexit, sys\n"
    code += "atexit.register(lambda: print('torch' in sys.modules))\nmain()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], check=True, capture_output=True, text=True)
    assert done.stdout.endswith("False\n")
    for panel, commands in PANELS.items():
        for name in (panel, *commands):
            assert (f" {name} " in done.stdout) == (panel != HIDDEN), name


@pytest.mark.parametrize("name", [c for c in COMMANDS if c not in ("roles", "data")])
def test_every_command_has_an_example_in_its_help(name: str) -> None:
    done = dear(name, "--help")
    assert done.returncode == 0
    assert f"dear {name}" in done.stdout.replace("\n", " ")


def test_zeroshot_prints_accuracy_for_people_and_programs(photos: Path) -> None:
    words = ("zeroshot", "--data", str(photos), "--template", "something {}", "--split", "all")
    answer = json.loads(dear(*words, "--json").stdout)
    assert answer["accuracy"] == 1.0
    assert answer["per_class"] == {"blue": 1.0, "red": 1.0}
    plain = dear(*words)
    assert "100.0% of 12 images" in plain.stdout
    assert "red" in plain.stdout


def test_adapt_evaluate_predict_report_and_retrieve(photos: Path, run: Path, tmp_path: Path) -> None:
    assert {"config.json", "adapter.safetensors", "roles.json", "metrics.json", "log.jsonl"} <= {
        path.name for path in run.iterdir()
    }
    assert not (run / "resume.safetensors").exists()
    report = json.loads(
        dear("evaluate", str(run), "--data", str(photos), "--mode", "decoupled", "--json").stdout
    )
    assert report["mode"] == "decoupled"
    assert set(report["modes"]) == {"fused", "decoupled"}
    image = str(photos / "red" / "0.png")
    prediction = json.loads(dear("predict", str(run), image, "--top", "2", "--json").stdout)["predictions"][0]
    assert {c["name"] for c in prediction["classes"]} == {"red", "blue"}
    assert sum(c["probability"] for c in prediction["classes"]) == pytest.approx(1.0, abs=1e-4)
    other = dear("predict", str(run), image, "--classes", "green, red, yellow", "--top", "1")
    assert "red" in other.stdout
    matches = dear(
        "retrieve", str(run), "--query", image, "--attribute", "color", "--gallery", str(photos),
        "--top", "2", "--out", str(tmp_path / "sheets"), "--json",
    )  # fmt: skip
    assert len(json.loads(matches.stdout)["attributes"]["Color"]) == 2
    assert (tmp_path / "sheets" / "color.png").is_file()


def test_roles_close_to_chance_are_not_shown(tmp_path: Path) -> None:
    chance = {"information": {"bits": 0.4, "rotated": 0.39, "deviation": 0.02, "rotations": 8}}
    file = tmp_path / "roles.json"
    structs.replace(RoleMap.table2(), evidence=chance).save(file)
    table = dear("roles", "show", str(file))
    assert "close to chance" in table.stderr
    assert "mixed" not in table.stdout


def test_roles_of_the_paper_can_be_shown() -> None:
    table = dear("roles", "show", "table2")
    assert "28 core" in table.stdout
    assert "Photo taken in Namib Desert" in table.stdout
    masks = dear("roles", "show", "table2", "--masks")
    assert "head 11" in masks.stdout
    assert "#" in masks.stdout


def test_table2_needs_no_images(tmp_path: Path) -> None:
    done = dear("roles", "discover", "--rule", "table2", "--out", str(tmp_path / "roles.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "roles.json").read_text())["rule"] == "table2"


def test_backbones_and_data_sets_are_listed() -> None:
    assert "openai/clip-vit-base-patch16" in dear("backbones").stdout
    names = json.loads(dear("data", "list", "--json").stdout)["datasets"]
    assert {"EuroSAT", "PACS", "world:textures"} <= set(names)


def test_wrong_use_of_a_process_gets_one_sentence_and_status_2(tmp_path: Path) -> None:
    """test_wrong_uses.py has all of them."""
    command = [sys.executable, "-c", "from dear.cli import main; main()", "zeroshot", "--data", "no/such"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "no/such" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_every_method_has_a_line() -> None:
    from dear.methods import METHODS

    assert all(kind.about for kind in METHODS.values())


@pytest.mark.parametrize("name", ["coop", "dear", "two-stage"])
def test_a_method_has_a_paper_entry(name: str) -> None:
    entry = json.loads(dear("methods", name, "--json").stdout)
    assert entry["method"] == name
    assert "CVPR" in entry["citation"] or "IJCV" in entry["citation"]
    assert entry["description"]
    assert entry["departures"]
    assert entry["options"]
    assert "Departures" in dear("methods", name).stdout
