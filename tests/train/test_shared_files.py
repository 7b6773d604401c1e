"""Test images that are copies of training images are reported before training."""

from __future__ import annotations

import shutil
from pathlib import Path

from PIL import Image

from dear.train.setup.notices import split_notices


def test_copies_of_training_images_among_test_images_are_counted(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        for label, name in enumerate(("ant", "bee")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                color = (100 * label, 30 * number, 9 if split == "train" else 200)
                Image.new("RGB", (16, 16), color).save(folder / f"{number}.png")
    assert not split_notices(str(tmp_path))
    shutil.copy(tmp_path / "train" / "ant" / "1.png", tmp_path / "test" / "ant" / "copy.png")
    (sentence,) = split_notices(str(tmp_path))
    assert "1 of 5 test images" in sentence
