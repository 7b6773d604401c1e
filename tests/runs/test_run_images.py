"""The images of a run: its classes, its shots, readable files."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from dear.data.images import evenly_spaced
from dear.errors import DataError, UsageError
from dear.runs.images import run_images, training_images
from dear.runs.spec import Spec


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split, count in (("train", 6), ("test", 2)):
        for label, name in enumerate(("ant", "bee", "cat")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                color = (80 * label, 20 * number, 40 if split == "train" else 200)
                Image.new("RGB", (24, 24), color).save(folder / f"{number}.png")
    return tmp_path


def test_the_classes_and_shots_of_the_run(photos: Path) -> None:
    spec = Spec(data=str(photos), shots=2, classes=("cat", "ant"))
    images = training_images(spec)
    assert images.classes == ("cat", "ant")
    assert images.labels.bincount().tolist() == [2, 2]
    assert run_images(spec, "train").labels.bincount().tolist() == [6, 6]
    assert run_images(spec).labels.bincount().tolist() == [2, 2]


def test_unreadable_images_are_left_out(photos: Path) -> None:
    (photos / "train" / "bee" / "3.png").write_bytes(b"no image")
    images = training_images(Spec(data=str(photos), unreadable="skip"))
    assert images.labels.bincount().tolist() == [6, 5, 6]


def test_a_run_without_a_dataset_and_one_that_moved(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        training_images(Spec())
    with pytest.raises(DataError, match="gone"):
        training_images(Spec(data=str(tmp_path / "gone")))


def test_even_places_never_exceed_the_count() -> None:
    for total in range(1, 40):
        places = evenly_spaced(total, 7)
        assert len(places) == min(7, total) == len(set(places))
        assert max(places) < total
