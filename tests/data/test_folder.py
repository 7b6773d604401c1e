"""Folders of class folders: order, splits, what is passed over, what is refused."""

import json
import random
import re
import shutil

import pytest
from typer.testing import CliRunner

from dear.cli import build_app
from dear.data import check_images, open_data
from dear.data.check import class_counts, describe_balance
from dear.data.open import open_folder
from dear.errors import DataError


def test_classes_and_images_in_natural_order(paint):
    root = paint("b_c/2.png", "b_c/10.PNG", "A/1.jpg", "a10/x.png", "a2/x.png")
    data = open_folder(root, "all")
    assert data.classes == ("A", "a2", "a10", "b c")
    assert data.paths == ("A/1.jpg", "a2/x.png", "a10/x.png", "b_c/2.png", "b_c/10.PNG")
    assert data.labels.tolist() == [0, 1, 2, 3, 3]
    assert data.template == "a photo of a {}."
    assert data.name == root.name


def test_the_order_does_not_depend_on_the_file_system(paint, monkeypatch):
    root = paint(*(f"c{n % 5}/{n}.png" for n in range(30)))
    first = open_folder(root, "train").paths
    import os

    walk = os.walk

    def shuffled(top):
        for place, folders, files in walk(top):
            random.Random(3).shuffle(files)
            yield place, folders, files

    monkeypatch.setattr(os, "walk", shuffled)
    assert open_folder(root, "train").paths == first


def test_split_folders(paint):
    root = paint("train/cat/1.png", "train/dog/1.png", "test/dog/2.png", "val/cat/3.png", "test/emu/4.png")
    assert open_folder(root, "train").paths == ("train/cat/1.png", "train/dog/1.png")
    assert open_folder(root, "test").paths == ("test/dog/2.png", "test/emu/4.png")
    assert open_folder(root, "val").paths == ("val/cat/3.png",)
    assert len(open_folder(root, "all")) == 5
    assert {open_folder(root, split).classes for split in ("train", "test", "val")} == {("cat", "dog", "emu")}
    assert open_folder(root, "test").labels.tolist() == [1, 2]


def test_val_serves_as_test(paint):
    root = paint("Train/cat/1.png", "Val/cat/2.png")
    assert open_folder(root, "test").paths == ("Val/cat/2.png",)
    with pytest.raises(DataError, match=r"extra.*Train.*Val"):
        open_folder(root, "extra")


def test_a_class_may_be_called_train(paint):
    root = paint("train/1.png", "train/2.png", "bus/1.png", "bus/2.png")
    assert open_folder(root, "all").classes == ("bus", "train")
    nested = paint("n/train/steam/1.png", "n/bus/1.png") / "n"
    assert open_folder(nested, "all").classes == ("bus", "train")
    alone = paint("m/train/1.png", "m/test/1.png") / "m"
    assert open_folder(alone, "all").classes == ("test", "train")


def test_without_split_folders_a_fifth_is_held_out(paint):
    root = paint(*(f"cat/{n}.png" for n in range(10)), "dog/1.png", "dog/2.png", "emu/1.png")
    train, test = open_folder(root, "train"), open_folder(root, "test")
    assert train.labels.bincount(minlength=3).tolist() == [8, 1, 1]
    assert test.labels.bincount(minlength=3).tolist() == [2, 1, 0]
    assert not set(train.paths) & set(test.paths)
    assert len(open_folder(root, "all")) == 13
    before = set(test.paths)
    paint("fox/1.png", "fox/2.png")  # another class changes nothing in this one
    assert before < set(open_folder(root, "test").paths)
    with pytest.raises(DataError, match="'val'"):
        open_folder(root, "val")


def test_nested_hidden_and_other_files(paint):
    root = paint("cat/a/b/1.png", "cat/2.png", "cat/.hidden.png", "cat/.thumbs/3.png", ".git/4.png")
    (root / "cat" / "notes.txt").write_text("x")
    (root / "README.md").write_text("x")
    (root / "cat" / "loop").symlink_to(root)
    assert open_folder(root, "all").paths == ("cat/2.png", "cat/a/b/1.png")


def test_a_linked_class_folder_is_read(paint):
    root = paint("elsewhere/cats/1.png", "data/dog/1.png")
    (root / "data" / "cat").symlink_to(root / "elsewhere" / "cats")
    assert open_folder(root / "data", "all").classes == ("cat", "dog")


def test_empty_class_folders_are_skipped_with_a_warning(paint, caplog):
    root = paint("cat/1.png")
    (root / "dog").mkdir()
    (root / "emu" / "deeper").mkdir(parents=True)
    assert open_folder(root, "all").classes == ("cat",)
    (record,) = caplog.records
    assert (record.levelname, str(root) in record.getMessage()) == ("WARNING", True)
    assert "dog, emu" in record.getMessage()
    open_folder(root, "all")
    assert len(caplog.records) == 1  # once is enough
    (root / "cat" / "1.png").unlink()
    with pytest.raises(DataError, match=re.escape(str(root))):
        open_folder(root, "all")


def test_a_class_that_one_split_lacks_stays_a_class(paint, caplog):
    root = paint("train/cat/1.png", "train/dog/1.png", "test/cat/2.png")
    (root / "test" / "dog").mkdir()
    images = open_folder(root, "test")
    assert images.classes == ("cat", "dog")
    assert images.labels.tolist() == [0]
    assert str(root / "test") in caplog.text
    assert "dog" in caplog.text


def test_what_operating_systems_leave_behind_is_ignored(paint, caplog):
    root = paint("cat/1.png", "__MACOSX/cat/9.png", "cat/@eaDir/1.png", "cat/__MACOSX/2.png")
    for name in (
        ".DS_Store",
        "Thumbs.db",
        "cat/.DS_Store",
        "cat/Thumbs.db",
        "cat/._1.png",
        "cat/desktop.ini",
    ):
        (root / name).write_bytes(b"\0\1\2")
    assert open_folder(root, "all").paths == ("cat/1.png",)
    assert not caplog.records


def test_the_split_of_a_flat_folder_is_told(paint, caplog):
    caplog.set_level("INFO", "dear")
    root = paint(*(f"{name}/{number}.png" for name in ("cat", "dog") for number in range(10)))
    open_folder(root, "all")
    assert not caplog.records
    assert len(open_folder(root, "train")) == 16
    assert len(open_folder(root, "test")) == 4
    (record,) = caplog.records
    assert record.levelname == "INFO"
    for item in (str(root), "16 images", "4 "):
        assert item in record.getMessage()


def test_the_balance_of_classes(paint):
    root = paint("b/1.png", "b/2.png", "b/3.png", "a/1.png", "a/2.png", "a/3.png", "c10/1.png", "c2/1.png")
    counts = class_counts(open_folder(root, "all"))
    assert list(counts.items()) == [("c2", 1), ("c10", 1), ("a", 3), ("b", 3)]
    assert describe_balance(counts, 8).startswith(
        "8 images of 4 classes, from 1 to 3 per class; fewest: c2 1"
    )


@pytest.mark.parametrize(
    "pair", [("Cat", "cat"), ("Golden_Retriever", "golden retriever"), ("001.cat", "002.cat")]
)
def test_classes_that_read_the_same(paint, pair):
    root = paint(*(f"{name}/1.png" for name in pair))
    with pytest.raises(DataError) as caught:
        open_folder(root, "all")
    assert all(repr(name) in str(caught.value) for name in pair)


def test_what_is_no_folder_of_classes(paint, tmp_path):
    with pytest.raises(DataError, match="absent"):
        open_folder(tmp_path / "absent", "all")
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        open_folder(tmp_path, "all")
    root = paint("train/cat/1.png", "training/cat/1.png")
    with pytest.raises(DataError, match=r"train/.*training/"):
        open_folder(root, "train")
    other = paint("x/bad\x07name/1.png") / "x"
    with pytest.raises(DataError, match=r"U\+0007"):
        open_folder(other, "all")


def test_text_files_named_as_images_are_found_when_checked(paint):
    root = paint("cat/1.png", "dog/1.png")
    (root / "dog" / "2.jpg").write_text("hello")
    report = check_images(open_data(root, "all"), "skip")
    assert [image.key for image in report.unreadable] == ["dog/2.jpg"]


def test_a_split_folder_that_is_named_is_the_folder_that_is_used(paint):
    """As in `fit("photos/train")` and `score("photos/test")`; held-out images are never those trained on."""
    counts = {"train": 5, "test": 3, "val": 2}
    root = paint(
        *(f"photos/{s}/{c}/{n}.png" for s, k in counts.items() for c in ("cat", "dog") for n in range(k))
    )
    photos = root / "photos"
    for part, count in counts.items():
        for split in ("train", "test", "all"):
            images = open_data(photos / part, split)
            assert len(images) == 2 * count
            assert images.path(0).samefile(photos / part / "cat" / "0.png")
    assert open_data(photos / "train", "train").name == "photos"
    held_out = {part: open_data(photos / part, "held-out").path(0).parent.parent.name for part in counts}
    assert held_out == {"train": "test", "test": "val", "val": "test"}
    assert len(open_data(photos, "held-out")) == 6
    with pytest.raises(DataError, match="train"):
        open_data(photos / "train", "val")
    shutil.rmtree(photos / "test")
    assert len(open_data(photos / "train", "held-out")) == 2 * counts["val"]
    with pytest.raises(DataError, match="val"):
        open_data(photos / "val", "held-out")


def test_a_folder_that_only_happens_to_be_called_test_is_split(paint):
    root = paint(
        *(f"test/{c}/{n}.png" for c in ("cat", "dog") for n in range(5)), "other/1.png", "train/1.png"
    )
    assert len(open_folder(root / "test", "train")) == 8
    assert len(open_folder(root / "test", "test")) == 2


def test_a_check_counts_validation_images_and_names_files_that_are_no_images(paint):
    counts = {"train": 3, "test": 1, "val": 2}
    root = paint(
        *(f"{split}/{name}/{i}.png" for split, n in counts.items() for name in "ab" for i in range(n))
    )
    for name in ("notes.txt", ".DS_Store"):
        (root / "train" / "a" / name).write_text("x")
    done = CliRunner().invoke(build_app(), ["data", "check", str(root), "--json"])
    report = json.loads(done.stdout)
    assert {split: each["images"] // 2 for split, each in report["splits"].items()} == counts
    assert report["not_images"] == ["train/a/notes.txt"]
