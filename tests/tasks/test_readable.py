"""Damaged images: found without a pass of its own, skipped or all named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import tiny_clip

from dear.data import open_data
from dear.data.images import FileImages
from dear.errors import DataError, UsageError
from dear.images import views as image_file
from dear.methods import build_method
from dear.runs.model import Model
from dear.tasks.evaluate import evaluate

CLIP = tiny_clip(dtype=torch.float32)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number, name in enumerate(("red", "blue")):
        for index in range(4):
            path = tmp_path / "photos" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (200 - 20 * index, 40, 90 * number)).save(path)
    return tmp_path / "photos"


def method(images: FileImages):
    return build_method("zeroshot", CLIP, images.classes)


def test_every_image_is_decoded_once(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = open_data(photos, "all")
    opened: list[object] = []
    before = image_file.open_pixels

    def counted(source: image_file.Source, scratch: bool = False) -> np.ndarray:
        opened.append(source)
        return before(source, scratch)

    monkeypatch.setattr(image_file, "open_pixels", counted)
    evaluate(method(images), images, unreadable="stop")
    assert sorted(opened) == sorted(images.path(index) for index in range(8))


def test_skipped_images_are_left_out_and_named(photos: Path) -> None:
    (photos / "red" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut")
    images = open_data(photos, "all")
    found = evaluate(method(images), images, unreadable="skip")
    good = images.subset([i for i in range(len(images)) if "broken" not in images.key(i)])
    expected = Model(method(images)).evaluate(good)
    assert found.labels.tolist() == expected.labels.tolist()
    assert found.answers["default"].tolist() == expected.answers["default"].tolist()
    assert len(found.unreadable) == 1
    assert "red/broken.jpg" in found.unreadable[0]


def test_stopping_names_all_of_them(photos: Path) -> None:
    for name in ("red/a.jpg", "blue/b.jpg"):
        (photos / name).write_bytes(b"\xff\xd8\xff\xe0 cut")
    images = open_data(photos, "all")
    with pytest.raises(DataError) as error:
        evaluate(method(images), images)
    assert "red/a.jpg" in str(error.value)
    assert "blue/b.jpg" in str(error.value)
    assert error.value.hint == "unreadable"


def test_a_set_without_any_readable_image_and_a_wrong_policy(tmp_path: Path) -> None:
    for name in ("red", "blue"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut")
    images = open_data(tmp_path, "all")
    with pytest.raises(DataError, match=r"x\.jpg"):
        evaluate(method(images), images, unreadable="skip")
    with pytest.raises(UsageError, match="'ignore'"):
        evaluate(method(images), images, unreadable="ignore")
