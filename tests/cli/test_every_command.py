"""Every method through every command: adapt, evaluate, predict, report, export and serve, on one training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import shallow_mini, shallow_roles
from typer.testing import CliRunner

import dear
from dear.cli import build_app
from dear.clip.checkpoint import save_hf
from dear.data import few_shot, open_data
from dear.methods import METHODS, list_methods

TASK = "world:textures"
SMALL = ("--shots", "2", "--epochs", "1", "--batch", "10", "--device", "cpu", "--no-check")


def command(*words: str) -> str:
    result = CliRunner().invoke(build_app(), list(words))
    assert result.exit_code == 0, f"{' '.join(words)}: {result.output} {result.exception!r}"
    return result.stdout


@pytest.fixture(scope="session")
def few_images(tmp_path_factory) -> Path:
    """Two training images and one test image of each of five classes, as class folders."""
    folder = tmp_path_factory.mktemp("few")
    for split, shots in (("train", 2), ("test", 1)):
        images = open_data(TASK, split)
        images = few_shot(images.select_classes(images.classes[:5]), shots, 1)
        for index, label in enumerate(images.labels.tolist()):
            path = folder / split / images.classes[label] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            images.image(index).save(path)
    return folder


@pytest.fixture(scope="session")
def backbone(tmp_path_factory) -> Path:
    """A small backbone with roles beside it."""
    folder = tmp_path_factory.mktemp("backbone") / "clip"
    save_hf(shallow_mini(), folder)
    shallow_roles().save(folder.parent / "roles.json")
    return folder


@pytest.fixture(scope="session")
def runs_of_all(tmp_path_factory) -> Path:
    """A folder of runs, each made by the first test that needs it."""
    return tmp_path_factory.mktemp("runs")


def adapted(folder: Path, name: str, images: Path, backbone: Path) -> Path:
    if not (folder / name).exists():
        words = ("--data", str(images), "--method", name, "--out", str(folder / name))
        roles = ("--roles", str(backbone.parent / "roles.json")) if METHODS[name].uses_roles else ()
        command("adapt", *words, "--backbone", str(backbone), *roles, *SMALL)
    return folder / name


_predicted: dict[str, list[dict]] = {}


def predicted(runs: Path, name: str, images: Path, backbone: Path) -> list[dict]:
    """The answers of `dear predict`, made once."""
    if name not in _predicted:
        words = ("predict", str(adapted(runs, name, images, backbone)), str(images / "test"), "--reject")
        _predicted[name] = json.loads(command(*words, "--json", "--device", "cpu"))["predictions"]
    return _predicted[name]


@pytest.mark.parametrize("name", list_methods())
def test_a_method_goes_through_every_command(
    name: str, runs_of_all: Path, few_images: Path, backbone: Path, tmp_path
) -> None:
    run = adapted(runs_of_all, name, few_images, backbone)
    shown = ("--device", "cpu")
    for _ in range(2):  # the second time from the cache
        report = json.loads(command("evaluate", str(run), "--data", str(few_images), "--json", *shown))
    assert report["images"] == 5
    for answer in predicted(runs_of_all, name, few_images, backbone):
        values = [one["probability"] for one in answer["classes"]]
        assert len(values) == 5
        assert 0 < values[0] <= sum(values) <= 1 + 1e-6
        assert "rejected" in answer
    command("report", str(run), "--data", str(few_images), "--out", str(tmp_path / "page.html"), *shown)
    assert (tmp_path / "page.html").stat().st_size > 10_000
    if METHODS[name].mergeable:
        command("export", str(run), "--merged", str(tmp_path / "merged"))
        assert dear.load(tmp_path / "merged").config == dear.load(backbone).config


def test_all_runs_are_served_together(runs_of_all: Path, few_images: Path, backbone: Path) -> None:
    testclient = pytest.importorskip("fastapi.testclient")
    from dear.serve.app import make_app
    from dear.serve.service import Service

    answers = {name: predicted(runs_of_all, name, few_images, backbone)[0] for name in list_methods()}
    with testclient.TestClient(make_app(Service(runs_of_all, dear.load(backbone)))) as client:
        for name, answer in answers.items():
            image = Path(answer["image"])
            reply = client.post(
                f"/v1/models/{name}/classify", files=[("files", (image.name, image.read_bytes()))]
            )
            assert reply.status_code == 200, f"{name}: {reply.text}"
            best, expected = reply.json()["answers"][0]["classes"][0], answer["classes"][0]
            assert best["name"] == expected["name"]
            assert best["probability"] == pytest.approx(expected["probability"], abs=1e-4)
