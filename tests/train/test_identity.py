"""What makes a run the run that it is: compared on resuming, written to and read from its folder."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip, token_ids

from dear.data.images import DataSource
from dear.errors import RunError
from dear.heads.roles import RoleMap
from dear.methods import DeAR, build_method
from dear.runs.folder import load_run, read_config
from dear.runs.recipe import Recipe
from dear.runs.spec import Spec, roles_digest
from dear.train.run import Paused, train

CLASSES = ("red", "green", "blue")
RECIPE = Recipe(epochs=2, batch=5)


def method(roles: RoleMap | None = None) -> DeAR:
    clip = tiny_clip(dtype=torch.float32)
    return DeAR(clip, CLASSES, roles=roles or mixed_roles(), ids=token_ids())


def paused(folder: Path, roles: RoleMap | None = None) -> None:
    with pytest.raises(Paused):
        train(method(roles), Colors(), RECIPE, folder, stop=lambda: True)


def test_a_run_is_not_resumed_with_another_role_map(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", mixed_roles(seed=4)
    assert roles_digest(other) != roles_digest(mixed_roles())
    paused(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RunError, match="role map"):
        train(method(other), Colors(), RECIPE, folder, resume=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    resumed, uninterrupted = method(), method()
    train(resumed, Colors(), RECIPE, folder, resume=True)
    train(uninterrupted, Colors(), RECIPE)
    for name, tensor in uninterrupted.adapter_state().items():
        assert torch.equal(resumed.adapter_state()[name], tensor)


def test_a_role_map_exchanged_after_training_is_refused(tmp_path: Path) -> None:
    train(method(), Colors(), RECIPE, tmp_path / "run")
    mixed_roles(seed=4).save(tmp_path / "run" / "roles.json")
    with pytest.raises(RunError, match="role map"):
        load_run(tmp_path / "run", tiny_clip(dtype=torch.float32))


def test_every_part_that_decides_counts() -> None:
    base = Spec.of(method(), RECIPE, Colors())
    changes = {
        "method": "coop",
        "options": {**base.options, "beta": 0.5},
        "recipe": {**base.recipe, "lr": 0.5},
        "seed": 7,
        "classes": ("red", "green", "grey"),
        "template": "{}!",
        "ids": None,
        "identity": "sha256:0",
        "roles_digest": "0",
        "data_digest": "0",
        "balance": True,
        "correction": {"digest": "0"},
        "calibrate": True,
    }
    keys = {base.key}
    for name, value in changes.items():
        other = msgspec.structs.replace(base, **{name: value})
        assert len(base.differences(other)) == 1
        keys.add(other.key)
    assert len(keys) == 1 + len(changes)
    for name in ("preset", "backbone", "backbone_path", "data", "root", "dear"):  # notes that decide nothing
        named = base.changed(**{name: "paper"})
        assert named.key == base.key
        assert not base.differences(named)
    assert msgspec.json.decode(msgspec.json.encode(base), type=Spec) == base


def test_order_labels_and_contents_of_images_are_part_of_a_run() -> None:
    images, shuffled, relabeled = Colors(), Colors(), Colors()
    relabeled.labels = relabeled.labels.flip(0)
    shuffled.key = lambda index: f"colors/{11 - index:04d}"  # type: ignore[method-assign]
    changed = Colors()
    changed.data = 255 - changed.data
    sets = (images, shuffled, relabeled, changed)
    digests = {Spec.of(method(), RECIPE, data).data_digest for data in sets}
    assert len(digests) == 4


def test_where_a_run_comes_from_is_noted_and_decides_nothing(tmp_path: Path) -> None:
    folder, images = tmp_path / "run", Colors()
    images.source = DataSource("/data/pets", "/data")  # type: ignore[attr-defined]
    with pytest.raises(Paused):
        train(method(), images, RECIPE, folder, stop=lambda: True)
    config = read_config(folder)
    assert (config.data, config.root) == ("/data/pets", "/data")
    train(method(), Colors(), RECIPE, folder, resume=True)  # from elsewhere


def test_seconds_of_a_resumed_run_count_every_process(tmp_path: Path) -> None:
    stops: list[int] = []

    def stop() -> bool:
        time.sleep(0.3)
        stops.append(1)
        return len(stops) == 2

    with pytest.raises(Paused):
        train(method(), Colors(), RECIPE, tmp_path / "run", stop=stop)
    resumed = train(method(), Colors(), RECIPE, tmp_path / "run", resume=True)
    assert resumed.seconds > 0.6
    assert json.loads((tmp_path / "run/metrics.json").read_text())["seconds"] > 0.6
    again = train(method(), Colors(), RECIPE, tmp_path / "run", resume=True)  # nothing is left to do
    assert again.seconds == pytest.approx(resumed.seconds, abs=1e-3)


def test_an_unknown_key_of_a_configuration_is_refused(tmp_path: Path) -> None:
    train(build_method("coop", tiny_clip(dtype=torch.float32), CLASSES), Colors(), RECIPE, tmp_path / "run")
    path = tmp_path / "run/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "stray": 1}))
    with pytest.raises(RunError, match="stray"):
        read_config(tmp_path / "run")
