"""Images that change, and role maps that were found on others: nothing old is taken for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny import Colors, tiny_clip

from dear.data import open_data
from dear.errors import RunError
from dear.heads.roles import RoleMap
from dear.tasks.adapt import adapt
from dear.tasks.evaluate import open_held_out
from dear.tasks.repair import repair
from dear.train.run import Paused
from dear.train.setup import roles as finding
from dear.train.setup.roles import roles_for

CLIP = tiny_clip(dtype=torch.float32)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    colors = Colors(each=5)
    for split in ("train", "test"):
        for i, label in enumerate(colors.labels.tolist()):
            path = tmp_path / "photos" / split / colors.classes[label] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            colors.image(i).save(path)
    return tmp_path / "photos"


def replace(photos: Path) -> None:
    Image.new("RGB", (24, 24), (7, 8, 9)).save(photos / "train" / "red" / "0.png")


def test_a_run_is_not_resumed_with_other_images(photos: Path, tmp_path: Path) -> None:
    settings = {"method": "coop", "backbone": CLIP, "recipe": {"epochs": 2, "batch": 4}, "calibrate": False}
    with pytest.raises(Paused):
        adapt(photos, tmp_path / "run", stop=lambda: True, **settings)
    replace(photos)
    with pytest.raises(RunError, match="training images"):
        adapt(photos, tmp_path / "run", resume=True, **settings)


def test_a_run_is_not_repaired_with_other_images(photos: Path, tmp_path: Path) -> None:
    adapt(photos, tmp_path / "run", method="linear-probe", backbone=CLIP, recipe={"epochs": 1})
    replace(photos)
    with pytest.raises(RunError, match="training images"):
        repair(tmp_path / "run", None, backbone=CLIP)


def test_held_out_images_of_a_training_folder_lie_beside_it(photos: Path) -> None:
    held = open_held_out(photos / "train")
    assert held is not None
    trained = open_data(photos / "train", "train")
    files = [{str(some.path(i).resolve()) for i in range(len(some))} for some in (held, trained)]
    assert not files[0] & files[1]


def test_roles_found_on_other_images_are_not_taken(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    counts: list[int] = []

    def discover(clip: object, images: object, **options: object) -> RoleMap:
        counts.append(len(images))
        vision = CLIP.config.vision
        return RoleMap.uniform("mixed", vision.last_third, vision.heads)

    monkeypatch.setattr(finding, "discover_roles", discover)
    monkeypatch.setattr(finding, "known_roles", lambda clip: None)
    monkeypatch.setattr(finding, "role_map_warnings", lambda roles: [])
    train = open_data(photos, "train")
    first, again = (roles_for(CLIP, train, None)[1] for _ in range(2))
    roles_for(CLIP, train.subset(range(6)), None)
    assert counts == [15, 6]
    assert "15 images" in first[0]
    assert "15 images" in again[0]
    renamed = tiny_clip(dtype=torch.float32)
    renamed.name = "renamed"  # the same weights from another folder
    assert roles_for(renamed, train, None)[0].backbone == "renamed"
    assert counts == [15, 6]
    replace(photos)
    roles_for(CLIP, train, None)
    assert counts == [15, 6, 15]
