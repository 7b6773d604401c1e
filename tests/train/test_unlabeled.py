"""Unlabeled images in training: where they come from, what is decided, what is learned and recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import Colors, mixed_roles, tiny_clip

import dear
from dear import Classifier
from dear.data.open import open_data
from dear.data.unlabeled import open_unlabeled, unlabeled_part
from dear.errors import DataError, InputError, RunError, UsageError
from dear.runs.folder import read_config, read_metrics
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.tasks.adapt import adapt
from dear.train.setup.prepare import prepare
from dear.train.teacher import Teacher, repeat_labeled

CLIP = tiny_clip(dtype=torch.float32)
QUICK = {"epochs": 2, "batch": 8}


def save(images: Colors, root: Path, folders: bool) -> Path:
    for place, label in enumerate(images.labels.tolist()):
        folder = root / images.classes[label] if folders else root
        folder.mkdir(parents=True, exist_ok=True)
        images.image(place).save(folder / f"{place}.png")
    return root


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    save(Colors(each=4, seed=0), root / "train", folders=True)
    save(Colors(each=4, seed=1), root / "test", folders=True)
    return root


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(Colors(each=10, seed=2), tmp_path_factory.mktemp("pool"), folders=False)


@pytest.mark.parametrize("method", ["proker", "linear-probe", "dear"])
def test_methods_train_on_unlabeled_images(photos: Path, pool: Path, tmp_path: Path, method: str) -> None:
    roles = mixed_roles() if method == "dear" else None
    settings = {"backbone": CLIP, "method": method, "roles": roles, "recipe": QUICK}
    run = adapt(photos, tmp_path / "run", unlabeled=pool, unlabeled_weight=1.0, **settings)
    facts = read_metrics(tmp_path / "run")["unlabeled"]
    assert facts == run.metrics["unlabeled"]
    assert facts["images"] == 30
    assert 0 < facts["used"] == sum(facts["per_class"].values()) <= 30 - facts["foreign"]
    assert 0 < facts["confidence"]["least"] <= facts["confidence"]["mean"] <= 1
    config = read_config(tmp_path / "run")
    assert (config.images, config.unlabeled, config.unlabeled_weight) == (12, str(pool), 1.0)
    without = adapt(photos, **settings)
    assert config.key != without.spec.key
    states = [one.method.state_dict() for one in (run, without)]
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0] if name in states[1])
    assert run.calibration is not None
    assert len(run.reference.labels) == 12  # nearness is that to labeled images


def test_weight_zero_is_a_training_without_them(photos: Path, pool: Path) -> None:
    settings = {"backbone": CLIP, "method": "proker"}
    one, two = adapt(photos, unlabeled=pool, unlabeled_weight=0.0, **settings), adapt(photos, **settings)
    assert "unlabeled" not in one.metrics
    assert one.spec.key == two.spec.key


def test_resume_trains_the_same(photos: Path, pool: Path, tmp_path: Path) -> None:
    settings = {"backbone": CLIP, "roles": mixed_roles(), "recipe": QUICK, "calibrate": False}
    settings |= {"unlabeled": pool, "unlabeled_weight": 0.5}
    adapt(photos, tmp_path / "whole", **settings)
    with pytest.raises(RunError, match="step 2"):
        adapt(photos, tmp_path / "run", **settings, stop=iter([False, True]).__next__)
    with pytest.raises(RunError, match="unlabeled"):
        adapt(photos, tmp_path / "run", **(settings | {"unlabeled_weight": 1.0}), resume=True)
    adapt(photos, tmp_path / "run", **settings, resume=True)
    both = [(tmp_path / name / "adapter.safetensors").read_bytes() for name in ("whole", "run")]
    assert both[0] == both[1]


def test_rest_of_a_draw(photos: Path) -> None:
    job = prepare(Spec(data=str(photos), method="proker", shots=1, unlabeled="rest", seed=3), clip=CLIP)
    assert (len(job.images), job.pool.images, job.pool.reason) == (3, 9, "unknown")
    with pytest.raises(UsageError, match="shots"):
        prepare(Spec(data=str(photos), method="proker", unlabeled="rest"), clip=CLIP)
    with pytest.raises(DataError, match=r"\b12\b"):
        prepare(Spec(data=str(photos), method="proker", shots=4, unlabeled="rest"), clip=CLIP)


def test_unlabeled_images_inside_the_data(photos: Path, pool: Path, tmp_path: Path) -> None:
    root = tmp_path / "photos"
    save(Colors(each=4, seed=0), root / "train", folders=True)
    save(Colors(each=2, seed=5), root / "unlabeled", folders=False)
    assert open_data(root, "train").classes == ("blue", "green", "red")
    assert len(unlabeled_part(root)) == 6
    job = prepare(Spec(data=str(root), method="proker"), clip=CLIP)
    assert job.pool.images == 6
    rows = [f"train/{name}/{place}.png,{name}" for place, name in enumerate(["red", "green", "blue"])]
    images = sorted(path.relative_to(root).as_posix() for path in (root / "train").rglob("*.png"))
    rows = [f"{path},{path.split('/')[1]}" for path in images]
    rows += [f"unlabeled/{place}.png," for place in range(6)]
    (root / "table.csv").write_text("path,label\n" + "\n".join(rows) + "\n")
    assert len(open_data(root / "table.csv", "all")) == 12
    assert len(unlabeled_part(root / "table.csv")) == 6
    (root / "table.jsonl").write_text('{"path": "unlabeled/0.png", "label": null}\n')
    assert len(unlabeled_part(root / "table.jsonl")) == 1
    (root / "paths.csv").write_text("path\nunlabeled/1.png\n")
    assert open_unlabeled(root / "paths.csv").paths == ("unlabeled/1.png",)
    assert len(open_unlabeled("world:textures")) == len(open_data("world:textures", "train"))


def test_foreign_and_bad_pools(photos: Path, pool: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        adapt(photos, backbone=CLIP, method="proker", unlabeled=tmp_path / "empty")
    for folder in ("train", "test"):  # test images would be answered better than new ones
        with pytest.raises(DataError, match=r"\b12\b"):
            adapt(photos, backbone=CLIP, method="proker", unlabeled=photos / folder)
    changed = tmp_path / "changed"  # of six labeled or test images, and nine others
    save(Colors(each=3, seed=7), changed, folders=False)
    for place, path in enumerate(sorted(photos.glob("*/red/*.png"))[1:7]):
        Image.open(path).save(changed / f"copy {place}.jpg", quality=95, subsampling=0)
    job = prepare(Spec(data=str(photos), method="proker", unlabeled=str(changed)), clip=CLIP)
    assert (job.pool.images, job.pool.copies) == (9, 6)
    broken = save(Colors(each=3, seed=7), tmp_path / "broken", folders=False)
    (broken / "x.png").write_bytes(b"no image")
    job = prepare(Spec(data=str(photos), method="proker", unlabeled=str(broken)), clip=CLIP)
    assert job.pool.images == 9
    assert "x.png" in job.pool.unreadable[0]
    with pytest.raises(UsageError, match=r"1\.5"):
        Spec().changed(unlabeled_weight=1.5)
    with pytest.raises(DataError, match="nowhere"):
        adapt(photos, backbone=CLIP, method="proker", unlabeled=tmp_path / "nowhere")


def test_a_note_about_the_data_is_not_repeated(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(Colors(each=6, seed=0), tmp_path / "photos", folders=True)  # names no split: a note says so
    monkeypatch.chdir(tmp_path)
    with caplog.at_level("INFO", logger="dear"):
        prepare(Spec(data="photos", method="proker", unlabeled=str(pool)), clip=CLIP)
    assert sum("photos: " in record.message for record in caplog.records) == 1


def test_a_pool_of_another_kind_is_rejected_with_its_distance(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "noise").mkdir()
    for place in range(8):
        values = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(values).save(tmp_path / "noise" / f"{place}.png")
    job = prepare(
        Spec(
            data="world:vehicles", shots=4, method="proker", calibrate=False,
            unlabeled=str(tmp_path / "noise"), unlabeled_weight=1.0,
        )
    )  # fmt: skip
    assert (job.pool.reason, job.pool.used, job.teacher) == ("far", 0, None)
    assert f"{job.pool.nearness[0]:.2f}" in job.notices[-1]
    assert job.pool.to_dict()["foreign"] == 8


def test_held_out_labels_do_not_reach_the_teacher() -> None:
    """An unlabeled image that only a held-out label explains must not be labeled with it."""
    features = torch.nn.functional.normalize(
        torch.tensor([[1.0, 0.1], [1, -0.1], [0.1, 1], [-0.1, 1], [0.3, 1]])
    )
    teacher = Teacher(
        features, torch.zeros(2, 2), torch.tensor([1]), torch.tensor([0]), images=Colors(each=1, seed=0)
    )
    assert teacher.label(torch.tensor([0, 0, 1, 1])).tolist() == [1]
    assert teacher.label(torch.tensor([0, 0, -1, -1])).tolist() == [-1]
    places, labels = teacher.extend(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2]))
    assert (places.tolist(), labels.tolist()) == ([0, 2, 4], [0, 1, 1])


def test_weights_are_repeats_and_classes_are_balanced() -> None:
    labels = torch.tensor([0, 1, 0, 0, 0, 0])
    rows = repeat_labeled(labels, labeled=2, weight=0.5, balance=True)
    shown = labels[torch.tensor(rows)]
    assert int((shown == 0).sum()) == int((shown == 1).sum()) == 6


def test_classifier_reads_missing_labels(photos: Path, pool: Path) -> None:
    images = open_data(photos, "train")
    files = [str(images.path(index)) for index in range(12)] + sorted(map(str, pool.glob("*.png")))
    names = [images.classes[label] for label in images.labels.tolist()] + [None] * 30
    settings = {"method": "proker", "backbone": CLIP, "calibrate": False}
    clf = Classifier(**settings).fit(files, names)
    assert clf.classes_.tolist() == ["blue", "green", "red"]
    assert clf.run_.metrics["unlabeled"]["images"] == 30
    numbers = [*images.labels.tolist(), *[-1] * 30]
    words = dict(enumerate(images.classes))
    other = Classifier(**settings).fit(files, numbers, class_names=words)
    assert other.classes_.tolist() == [0, 1, 2]
    third = Classifier(**settings).fit(files[:12], names[:12], unlabeled=files[12:])
    for one in (other, third):
        state = one.method_.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in clf.method_.state_dict().items())
    with pytest.raises(InputError, match="30"):
        clf.fit(files, names, unlabeled=files[12:])
    with pytest.raises(InputError, match=r"42 .*41 "):
        clf.fit(files, names[:-1])


def test_answers_of_a_saved_run_are_the_same(photos: Path, pool: Path, tmp_path: Path) -> None:
    trained = adapt(photos, tmp_path / "run", backbone=CLIP, method="proker", unlabeled=pool)
    images = open_data(photos, "test")
    loaded = Model.of(tmp_path / "run", CLIP)
    assert torch.equal(trained.probabilities(images), loaded.probabilities(images))


def test_calibration_and_rejection_stay_correct_with_a_pool() -> None:
    """Pseudo-labels make no held-out label known: confidence and refusals agree with test images."""
    train = open_data("world:vehicles", "train")
    images = train.select_classes(train.classes[:6])
    images = images.subset(range(0, len(images), 2))
    test = open_data("world:vehicles", "test").select_classes(images.classes)
    test = test.subset(range(0, len(test), 3))
    settings = {"backbone": dear.load("mini"), "method": "proker", "shots": 6}
    pool = adapt(images, unlabeled="rest", unlabeled_weight=1.0, **settings)
    only = adapt(images, **settings)
    assert pool.metrics["unlabeled"]["used"] > 36
    errors = [model.evaluate(test).calibration_errors()["ece"] for model in (pool, only)]
    assert errors[0] < max(0.15, errors[1] + 0.05)
    refused = [one.rejected for one in pool.answers(test, reject=0.1)]
    limit = 0.1 + 3 * (0.1 * 0.9 / 36 + 0.1 * 0.9 / len(test)) ** 0.5  # of 36 held out and of the test images
    assert sum(refused) / len(refused) < limit


def test_a_class_without_labels_is_named_before_the_work(pool: Path) -> None:
    images = Colors(each=3, seed=0)
    some = images.subset([place for place, label in enumerate(images.labels.tolist()) if label < 2])
    spec = Spec(method="proker", calibrate=False, unlabeled=str(pool))
    job = prepare(spec, some, drawn=True, clip=CLIP)
    assert any(images.classes[2] in notice and "label" in notice for notice in job.notices)
