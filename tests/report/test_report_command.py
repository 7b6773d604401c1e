"""`dear report` and `dear export` as a person types them, on a run over a small folder of images."""

import json
import shutil
import subprocess
import sys

import food
import pytest
from PIL import Image
from tiny import mixed_roles
from typed import run as typed

import dear
from dear.tasks.adapt import adapt


def dear_command(*arguments):
    return typed(*map(str, arguments))


def dear_process(*arguments, before):
    """The command in a process of its own, in which `before` makes a module missing."""
    code = f"import sys; {before}; sys.argv[0] = 'dear'\nfrom dear.cli import main\nmain()"
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of plain images, of which a run knows two."""
    root = tmp_path_factory.mktemp("photos")
    for name, color in (
        ("red thing", (200, 30, 30)),
        ("blue thing", (30, 30, 200)),
        ("green thing", (20, 160, 20)),
    ):
        for split, count in (("train", 2), ("test", 3)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                shade = tuple(min(255, part + 9 * number) for part in color)
                Image.new("RGB", (80, 70), shade).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    images = dear.open_data(photos, "train").select_classes(["red thing", "blue thing"])
    adapt(images, out, shots=2, recipe={"epochs": 2}, calibrate=False)
    return out


def test_a_report_is_one_page_with_trained_and_new_classes(run, photos, tmp_path):
    done = dear_command("report", run, "--data", photos, "--out", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "2 classes, 6 test images" in page
    assert "3 images of 1 new class" in page
    assert "<h2>Training</h2>" in page


def test_a_run_finds_its_own_images_from_any_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = dear_command("report", run, "--out", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "2 classes, 6 test images" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_run_without_its_images_asks_for_them(run, tmp_path):
    from dear.studio.state import open_state

    moved = tmp_path / "run"
    shutil.copytree(run, moved)
    config = json.loads((moved / "config.json").read_text())
    for source, sentence in ((str(tmp_path / "gone"), "gone"), (None, "not recorded")):
        config["data"] = source
        (moved / "config.json").write_text(json.dumps(config))
        done = dear_command("report", moved, "--out", tmp_path / "page.html")
        assert done.returncode == 2
        assert sentence in done.stderr
        assert "--data" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "page.html").exists()
    (tmp_path / config["dataset"]).mkdir()  # a folder of that bare name here is not the run's data
    (tmp_path / "studio").mkdir()
    assert open_state(tmp_path / "studio", run=str(moved)).images.name == "examples of the attribute world"


def test_an_exported_run_equals_pytorch_without_importing_it(photos, tmp_path):
    """On a small backbone; that a DeAR on mini's layers agrees is in tests/test_one_answer.py."""
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    run, settings = tmp_path / "run", {"recipe": {"epochs": 2}, "calibrate": False}
    adapt(photos, run, backbone=food.backbone(tmp_path / "clip"), roles=mixed_roles(), **settings)
    done = dear_command("export", run, "--onnx", tmp_path / "m.onnx", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["outputs"] == ["scores", "decoupled"]
    assert told["difference"] < 1e-3
    image = photos / "test" / "red thing" / "0.png"
    without = "sys.modules['torch'] = None"  # importing it would fail
    answer = dear_process("predict", "--onnx", tmp_path / "m.onnx", image, "--json", before=without)
    assert answer.returncode == 0, answer.stderr
    plain = dear_command("predict", run, image, "--json")
    got, wanted = (json.loads(one.stdout)["predictions"][0]["classes"] for one in (answer, plain))
    assert [entry["name"] for entry in got] == [entry["name"] for entry in wanted]
    assert got[0]["probability"] == pytest.approx(wanted[0]["probability"], abs=1e-3)


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("gradio", ["studio"], "[studio]"),
        ("onnxruntime", ["predict", "--onnx", "m.onnx", "x.png"], "[onnx]"),
    ],
)
def test_a_missing_extra_is_one_sentence(missing, arguments, extra):
    done = dear_process(*arguments, before=f"sys.modules[{missing!r}] = None")
    assert done.returncode == 2
    assert extra in done.stderr
    assert done.stderr.count("\n") == 1
