"""The same settings train the same on every surface: images, learned tensors and calibration, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

import dear
from dear.bench.cells import Environment
from dear.bench.plan import Request, find_protocol, plan
from dear.bench.session import Session
from dear.cli import build_app
from dear.data.shots import few_shot
from dear.heads.known_roles import known_roles
from dear.methods import ZeroShot, build_method
from dear.runs.folder import read_config
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.studio.state import StudioState
from dear.studio.training import Trainer
from dear.tasks.adapt import adapt
from dear.tasks.repair import repair
from dear.train.setup.prepare import explicit_options, recipe_for

COUNTS = (3, 5, 8, 8)
SHOTS, SEED, EPOCHS = 6, 3, 1
METHODS = ("linear-probe", "linear-probe+focus", "dear")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbalanced folder; one class has fewer images than shots, one file cannot be read."""
    root = tmp_path_factory.mktemp("data") / "photos"
    for split in ("train", "test"):
        images = dear.open_data("world:textures", split)
        for label, count in enumerate(COUNTS):
            folder = root / split / images.classes[label]
            folder.mkdir(parents=True)
            for number, row in enumerate((images.labels == label).nonzero()[:count, 0].tolist()):
                images.image(row).save(folder / f"{number}.png")
            if split == "train" and count == min(COUNTS):
                (folder / "0.png").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of `adapt` by method."""
    runs = {}
    for name in METHODS:
        runs[name] = tmp_path_factory.mktemp("runs") / name
        adapt(photos, runs[name], **settings(name))
    return runs


def settings(name: str) -> dict[str, object]:
    name, _, focus = name.partition("+")
    return {
        "method": name,
        "focus": "texture" if focus else None,
        "shots": SHOTS,
        "seed": SEED,
        "recipe": {"epochs": EPOCHS},
        "unreadable": "skip",
    }


def same(one: Model, other: Model) -> None:
    """Equal learned tensors and calibration."""
    ours, theirs = one.method.adapter_state(), other.method.adapter_state()
    assert list(ours) == list(theirs)
    assert ours
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert one.calibration is not None
    assert msgspec.to_builtins(one.calibration) == msgspec.to_builtins(other.calibration)


def test_the_images_are_drawn_skipped_and_repeated(trained: dict[str, Path]) -> None:
    spec = read_config(trained["dear"])
    assert (spec.images, spec.shots, spec.balance) == (2 + 5 + 6 + 6, SHOTS, True)
    assert spec.preset == "strong"
    steps = len(spec.classes) * 6 / spec.recipe["batch"]  # every class as often as the largest
    assert (trained["dear"] / "metrics.json").exists()
    metrics = msgspec.json.decode((trained["dear"] / "metrics.json").read_bytes())
    assert metrics["steps"] == EPOCHS * -(-steps // 1)


@pytest.mark.parametrize("name", METHODS)
def test_the_classifier_trains_the_same(name: str, photos: Path, trained: dict[str, Path]) -> None:
    named = {"method": settings(name)["method"], "focus": settings(name)["focus"]}
    clf = dear.Classifier(**named, shots=SHOTS, seed=SEED, epochs=EPOCHS, unreadable="skip").fit(str(photos))
    same(Model.load(trained[name]), clf.run_)
    assert clf.run_.spec.key == read_config(trained[name]).key


@pytest.mark.parametrize("name", METHODS)
def test_the_studio_trains_the_same(
    name: str, photos: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    clip, test = dear.load("mini"), dear.open_data(photos, "test")
    trainer = Trainer(StudioState(clip, None, test, tmp_path, Model(ZeroShot(clip, test.classes))))
    trainer.start(Spec().changed(data=str(photos), **settings(name)))
    assert trainer.wait(120).state == "finished", trainer.status.message
    assert trainer.run is not None
    same(Model.load(trained[name]), Model.load(trainer.run))
    assert read_config(trainer.run).key == read_config(trained[name]).key


@pytest.mark.parametrize("name", METHODS)
def test_a_repair_that_removes_nothing_trains_the_same(
    name: str, trained: dict[str, Path], tmp_path: Path
) -> None:
    repair(trained[name], None, tmp_path / "again")
    same(Model.load(trained[name]), Model.load(tmp_path / "again"))
    assert read_config(tmp_path / "again").key == read_config(trained[name]).key


def test_choose_and_adapt_trains_the_same(photos: Path, tmp_path: Path) -> None:
    words = f"choose --data {photos} --methods linear-probe --folds 2 --shots {SHOTS} --seed {SEED}"
    command = f"{words} --unreadable skip --adapt --out {tmp_path / 'chosen'}"
    build_app()(command.split(), standalone_mode=False)
    adapt(
        photos, tmp_path / "run", **{**settings("linear-probe"), "recipe": None, "shots": None}
    )  # all images
    same(Model.load(tmp_path / "run"), Model.load(tmp_path / "chosen"))


@pytest.mark.parametrize("name", METHODS)
def test_a_bench_cell_trains_the_same(name: str, photos: Path, trained: dict[str, Path]) -> None:
    spec = read_config(trained[name])
    request = Request(
        "mini",
        spec.identity,
        known_roles(dear.load("mini")),
        methods=[spec.method],
        datasets=[str(photos)],
        seeds=[SEED],
        shots=[SHOTS],
        recipe={key: value for key, value in spec.recipe.items() if key != "seed"},
        training=Spec(unreadable="skip", focus=spec.focus),
    )
    (cell,) = plan("few-shot", request)
    assert spec.focus or cell.spec.key == spec.key  # what a focus comes to is found when it trains
    session = Session(cell, Environment("mini"))
    same(Model.load(trained[name]), session.fit(find_protocol("few-shot").training(session.data)))


@pytest.mark.parametrize("name", ["linear-probe", "tip-adapter", "proker", "lp-plus-plus", "clip-adapter"])
def test_a_bench_cell_trains_as_adapt_does_with_nothing_said(name: str) -> None:
    data = "world:textures"
    request = Request("mini", dear.load("mini").identity, None, [name], [data], [SEED], [1])
    (cell,) = plan("few-shot", request)
    session = Session(cell, Environment("mini"))
    found = session.fit(find_protocol("few-shot").training(session.data)).method.adapter_state()
    expected = adapt(data, method=name, shots=1, seed=SEED, calibrate=False, check=False)
    assert found
    for tensor, value in expected.method.adapter_state().items():
        assert torch.equal(found[tensor], value), tensor


def test_dear_is_planned_as_adapt_trains_it() -> None:
    """Few images: the same least number of steps, and the paper's ten epochs where its preset is named."""
    clip = dear.load("mini")
    images = few_shot(dear.open_data("world:textures"), 2, SEED)
    request = Request("mini", "sha256:0", known_roles(clip), ["dear"], ["world:textures"], [SEED], [2])
    (cell,) = plan("few-shot", request)
    method = build_method("dear", clip, images.classes, roles=known_roles(clip))
    specs = (cell.spec, Spec(method="dear", shots=2, seed=SEED))
    ours, theirs = ((explicit_options(spec), recipe_for(spec, method, images.labels)) for spec in specs)
    assert ours[1] == theirs[1]
    assert ours[1].epochs > 10
    assert not {"views", "precision"} & set(cell.spec.recipe)  # as in adapt, the processor decides
    assert theirs[0].items() <= ours[0].items()
    (paper,) = plan("few-shot", replace(request, methods=["dear@paper"]))
    assert recipe_for(paper.spec, method, images.labels).epochs == 10


def test_dear_is_the_recommended_preset_on_a_bench_too() -> None:
    request = Request("mini", "sha256:0", known_roles(dear.load("mini")), ["dear"], ["nowhere"], [1], [1])
    (usual,) = plan("few-shot", request)
    (paper,) = plan("few-shot", replace(request, methods=["dear@paper"]))
    assert (usual.spec.preset, paper.spec.preset) == ("strong", "paper")
    assert usual.spec.options["token_start"] != paper.spec.options["token_start"]
