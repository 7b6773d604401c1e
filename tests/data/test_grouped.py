"""Images with a value beside the class: Waterbirds, CelebA, a table's column, worst groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from dear.data.check import check_dataset
from dear.data.images import FileImages, group_names, values_of
from dear.data.open import open_data
from dear.errors import DataError


def _image(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(path)


def _waterbirds(root: Path) -> Path:
    home = root / "waterbird_complete95_forest2water2"
    lines = ["img_id,img_filename,y,split,place,place_filename"]
    for number, (y, split, place) in enumerate([(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 2, 0), (0, 2, 0)]):
        name = f"00{y}.Some_bird/bird_{number}.jpg"
        _image(home / name)
        lines.append(f"{number},{name},{y},{split},{place},/x/{number}.jpg")
    (home / "metadata.csv").write_text("\n".join(lines) + "\n")
    return home


def _celeba(root: Path, suffix: str) -> Path:
    home = root / "celeba"
    people = [
        ("000001.jpg", -1, 1, 0),
        ("000002.jpg", 1, -1, 0),
        ("000003.jpg", 1, 1, 1),
        ("000004.jpg", -1, -1, 2),
    ]
    for name, *_ in people:
        _image(home / "img_align_celeba" / name)
    if suffix == "txt":
        attributes = "".join(f"{name}  1 {blond:2d} -1 {male:2d}\n" for name, blond, male, _ in people)
        (home / "list_attr_celeba.txt").write_text(f"4\nBald Blond_Hair Eyeglasses Male\n{attributes}")
        (home / "list_eval_partition.txt").write_text("".join(f"{n} {split}\n" for n, _, _, split in people))
    else:
        attributes = "".join(f"{name},1,{blond},{male}\n" for name, blond, male, _ in people)
        (home / "list_attr_celeba.csv").write_text(f"image_id,Bald,Blond_Hair,Male\n{attributes}")
        rows = "".join(f"{n},{split}\n" for n, _, _, split in people)
        (home / "list_eval_partition.csv").write_text(f"image_id,partition\n{rows}")
    return home


def test_waterbirds_as_published(tmp_path: Path) -> None:
    _waterbirds(tmp_path)
    train, test = (open_data("Waterbirds", split, root=tmp_path) for split in ("train", "test"))
    assert train.classes == ("landbird", "waterbird")
    assert values_of(train) == ("land", "water")
    assert group_names(test) == ("waterbird, land", "landbird, land")
    assert test.pixels([0], 8).shape == (1, 3, 8, 8)
    assert values_of(test.select_classes(["waterbird"])) == ("land",)
    assert check_dataset("waterbirds", tmp_path).complete


@pytest.mark.parametrize("suffix", ["txt", "csv"])
def test_celeba_as_published(tmp_path: Path, suffix: str) -> None:
    _celeba(tmp_path, suffix)
    images = open_data("CelebA", "all", root=tmp_path)
    assert images.labels.tolist() == [0, 1, 1, 0]
    assert values_of(images) == ("male", "female", "male", "female")
    assert len(open_data("CelebA", "val", root=tmp_path)) == 1


def test_malformed_lists_name_the_line(tmp_path: Path) -> None:
    home = _waterbirds(tmp_path)
    text = (home / "metadata.csv").read_text()
    (home / "metadata.csv").write_text(
        text.replace("3,001.Some_bird/bird_3.jpg,1,2,0", "3,001.Some_bird/bird_3.jpg,7,2,0")
    )
    with pytest.raises(DataError, match=r"line 5: .*bird_3\.jpg"):
        open_data("Waterbirds", "test", root=tmp_path)
    (home / "metadata.csv").write_text(text.replace("001.Some_bird/bird_1.jpg", "../../escape.jpg"))
    with pytest.raises(DataError, match="line 3"):
        open_data("Waterbirds", "test", root=tmp_path)
    (home / "metadata.csv").write_text("img_filename,y,split\n")
    with pytest.raises(DataError, match="place"):
        open_data("Waterbirds", "test", root=tmp_path)
    home = _celeba(tmp_path, "txt")
    (home / "list_attr_celeba.txt").write_text("1\nBald Blond_Hair Eyeglasses Male\n000001.jpg 1 1\n")
    with pytest.raises(DataError, match=r"line 3: .*5.*3"):
        open_data("CelebA", "train", root=tmp_path)


@pytest.mark.parametrize("column", ["group", "domain"])
def test_a_table_may_name_groups(tmp_path: Path, column: str) -> None:
    rows = [f"path,label,split,{column}"]
    for number in range(6):
        _image(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{'ab'[number % 2]},train,{'xyz'[number // 2]}")
    (tmp_path / "t.csv").write_text("\n".join(rows))
    images = open_data(tmp_path / "t.csv", "train")
    assert group_names(images) == ("a, x", "b, x", "a, y", "b, y", "a, z", "b, z")
    assert values_of(images.subset([4, 1])) == ("z", "x")


def test_a_group_for_every_image() -> None:
    with pytest.raises(DataError, match=r"\b2\b.*\b1\b"):
        FileImages("d", ("a",), "{}", Path("."), ("x.png", "y.png"), torch.zeros(2).long(), groups=("g",))
