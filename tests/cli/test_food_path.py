"""The first hour: from a folder of food photos to a CSV of answers in four commands, with local weights."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import food
import pytest
from typed import dear

from dear.heads.corpus import load_corpus
from dear.runs.folder import read_config


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    food.photos(home / "food")
    food.backbone(home / "models" / "tiny-clip")
    return home


def test_from_folder_to_table_in_four_commands(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(place)
    assert dear("data", "check", "food")[0] == 0

    words = ["adapt", "--data", "food", "--backbone", "models/tiny-clip", "--out", "run", "--epochs", "3"]
    status, output = dear(*words)
    assert status == 0, output
    for item in ("24 images", "3 classes", "6 images", "6 held-out", "fused"):
        assert item in output
    following = next(line for line in output.splitlines() if line.startswith("next: "))
    config = read_config(place / "run")
    assert config.backbone_path == str(place / "models" / "tiny-clip")

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    status, output = dear(*following.removeprefix("next: dear ").split())  # as it was printed
    assert status == 0, output
    monkeypatch.chdir(elsewhere)  # and the backbone is found from any folder
    assert dear("evaluate", str(place / "run"), "--data", str(place / "food"))[0] == 0

    monkeypatch.chdir(place)
    (place / "food" / "apple_pie" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut")
    status, output = dear("predict", "run", "food", "--csv", "answers.csv")
    (place / "food" / "apple_pie" / "broken.jpg").unlink()
    assert status == 1, output  # an image could not be read
    assert output.count("broken.jpg") == 1
    assert "1 of 31" in output
    rows = list(csv.DictReader((place / "answers.csv").open()))
    assert len(rows) == 31
    assert set(rows[0]) >= {"image", "answer", "class_1", "probability_1", "error"}
    bad = [row for row in rows if row["error"]]
    assert [Path(row["image"]).name for row in bad] == ["broken.jpg"]
    assert bad[0]["answer"] == bad[0]["class_1"] == ""
    good = [row for row in rows if not row["error"]]
    assert {row["answer"] for row in good} <= {"apple pie", "green salad", "tomato soup"}
    assert all(0 <= float(row["probability_1"]) <= 1 for row in good)


def test_a_second_adaptation_uses_the_kept_roles(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    words = ["adapt", "--data", str(place / "food"), "--backbone", str(place / "models" / "tiny-clip")]
    words += ["--epochs", "1", "--no-check"]
    folder = tmp_path / "cache" / "roles"

    def kept() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}

    assert dear(*words, "--out", "one")[0] == 0
    discovered = kept()
    assert len(discovered) == 1
    assert dear(*words, "--out", "two")[0] == 0
    assert kept() == discovered
    maps = [(tmp_path / name / "roles.json").read_bytes() for name in ("one", "two")]
    assert maps[0] == maps[1]
    assert dear("cache", "clear")[0] == 0
    assert not kept()
    assert dear(*words, "--out", "three")[0] == 0
    assert len(kept()) == 1


def test_mini_says_that_it_knows_no_photos(place: Path, tmp_path: Path) -> None:
    words = ["adapt", "--data", str(place / "food"), "--out", str(tmp_path / "run"), "--epochs", "1"]
    status, output = dear(*words, "--no-check", "--method", "linear-probe")
    assert status == 0
    assert "'mini'" in output
    assert "openai/clip-vit-base-patch16" in output
    quiet = dear(
        "adapt", "--data", "world:textures", "--out", str(tmp_path / "w"), "--epochs", "1", "--shots", "5",
        "--no-check", "--method", "linear-probe",
    )[1]  # fmt: skip
    assert "openai/clip-vit-base-patch16" not in quiet


def test_lists_patterns_folders_and_standard_input(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io
    import sys

    from dear.cli.predict import _read_list
    from dear.errors import InputError
    from dear.images.names import find_images

    monkeypatch.chdir(place)
    assert len(find_images(["food"])) == 30
    assert len(find_images(["food/*/IMG_000.jpg"])) == 3
    assert len(find_images(["food/**/*.jpg"])) == 30
    assert find_images(["food/apple_pie/IMG_000.jpg", "nowhere.jpg"])[1] == "nowhere.jpg"
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("food/apple_pie/IMG_000.jpg\n\nfood/apple_pie/IMG_001.jpg\n")
    )
    assert len(_read_list(["-"])) == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(InputError):
        _read_list(["-"])
    with pytest.raises(InputError, match=re.escape("food/*.webp")):
        find_images(["food/*.webp"])


def test_adapt_for_programs(place: Path, tmp_path: Path) -> None:
    told: list[object] = []
    words = ["adapt", "--data", str(place / "food"), "--backbone", str(place / "models" / "tiny-clip")]
    words += ["--method", "linear-probe", "--out", str(tmp_path / "run"), "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dear.cli.adapt.print_json", told.append)
        assert dear(*words)[0] == 0
    answer = json.loads(json.dumps(told[0]))
    assert (answer["images"], answer["held_out"]) == (24, 6)
    assert 0 <= answer["accuracy"]["before"] <= 1
    assert answer["accuracy"]["after"]["default"] >= 0.5  # three colors


def test_a_role_map_remembers_where_its_backbone_is(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(place)
    roles, corpus = tmp_path / "roles.json", tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{text}\t{tag}\n" for text, tag in list(load_corpus().tags.items())[::500]))
    words = ("roles", "discover", "--backbone", "models/tiny-clip", "--images", "food", "--concepts", "tags")
    assert dear(*words, "--corpus", str(corpus), "--out", str(roles))[0] == 0
    assert json.loads(roles.read_text())["location"] == str(place / "models" / "tiny-clip")
    monkeypatch.chdir(tmp_path)
    page = ("roles", "report", "roles.json", "--images", str(place / "food"), "--out", "page.html")
    status, output = dear(*page)
    assert status == 0, output
    assert (tmp_path / "page.html").is_file()
    document = json.loads(roles.read_text())
    roles.write_text(json.dumps(document | {"location": str(tmp_path / "gone")}))
    status, output = dear(*page)
    assert status == 2
    assert "gone" in output
    assert len(output) < 250, output
