"""Folders of class folders: order, splits, what is passed over, what is refused."""

import random

import pytest

from dear.data import check_images, open_data
from dear.data.folder import open_folder
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
    with pytest.raises(DataError, match=r"no extra/ folder; it has Train/, Val/"):
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
    with pytest.raises(DataError, match="only train, test and all"):
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


def test_empty_class_folders(paint):
    root = paint("cat/1.png")
    (root / "dog").mkdir()
    with pytest.raises(DataError, match=r"dog: the class folder holds no images"):
        open_folder(root, "all")
    assert open_folder(root, "all", allow_empty=True).classes == ("cat", "dog")


@pytest.mark.parametrize(
    "pair", [("Cat", "cat"), ("Golden_Retriever", "golden retriever"), ("001.cat", "002.cat")]
)
def test_classes_that_read_the_same(paint, pair):
    root = paint(*(f"{name}/1.png" for name in pair))
    with pytest.raises(DataError, match="both read") as caught:
        open_folder(root, "all")
    assert all(repr(name) in str(caught.value) for name in pair)


def test_what_is_no_folder_of_classes(paint, tmp_path):
    with pytest.raises(DataError, match="not a folder"):
        open_folder(tmp_path / "absent", "all")
    with pytest.raises(DataError, match="no class folders"):
        open_folder(tmp_path, "all")
    root = paint("train/cat/1.png", "training/cat/1.png")
    with pytest.raises(DataError, match="both train/ and training/"):
        open_folder(root, "train")
    other = paint("x/bad\x07name/1.png") / "x"
    with pytest.raises(DataError, match="control character"):
        open_folder(other, "all")


def test_text_files_named_as_images_are_found_when_checked(paint):
    root = paint("cat/1.png", "dog/1.png")
    (root / "dog" / "2.jpg").write_text("hello")
    report = check_images(open_data(root, "all"), "skip")
    assert [image.key for image in report.unreadable] == ["dog/2.jpg"]


def test_a_split_folder_given_by_itself_is_taken_whole(paint):
    """As in `fit("photos/train")` and `score("photos/test")`."""
    root = paint(
        *(f"photos/{s}/{c}/{n}.png" for s in ("train", "test") for c in ("cat", "dog") for n in range(5))
    )
    photos = root / "photos"
    for part in ("train", "test"):
        for split in ("train", "test", "all"):
            assert len(open_folder(photos / part, split)) == 10
    assert open_folder(photos / "train", "train").name == "photos"
    assert open_folder(photos / "train", "train").key(0) == "cat/0.png"


def test_a_folder_that_only_happens_to_be_called_test_is_split(paint):
    root = paint(
        *(f"test/{c}/{n}.png" for c in ("cat", "dog") for n in range(5)), "other/1.png", "train/1.png"
    )
    assert len(open_folder(root / "test", "train")) == 8
    assert len(open_folder(root / "test", "test")) == 2
