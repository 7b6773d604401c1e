"""Sets of images: views, subsets, classes, domains, what training gets."""

import os

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import tiny_clip

from dear.data import FileImages, ImageSet, check_images, select_domains
from dear.data.content import file_digest
from dear.data.images import ListedImages
from dear.errors import DataError, InputError, UsageError
from dear.images.views import resize_crop
from dear.runs.recipe import Recipe
from dear.train.crops import augment_batch
from dear.train.feed import Feed, TrainingPixels


@pytest.fixture
def four(tmp_path):
    rng = np.random.default_rng(0)
    sizes = [(40, 30), (30, 40), (16, 16), (90, 50)]
    for number, (width, height) in enumerate(sizes):
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(
            tmp_path / f"{number}.png"
        )
    return FileImages(
        name="four",
        classes=("cat", "dog", "emu"),
        template="a {}.",
        root=tmp_path,
        paths=tuple(f"{number}.png" for number in range(4)),
        labels=torch.tensor([2, 0, 1, 0]),
        domains=("photo", "sketch", "photo", "sketch"),
    )


def test_it_is_an_image_set(four):
    assert isinstance(four, ImageSet)
    assert len(four) == 4
    assert four.key(2) == "2.png"


def test_pixels_are_clips_view_in_the_order_asked(four):
    views = four.pixels([3, 0, 3], 16)
    assert views.dtype == torch.uint8
    expected = [resize_crop(Image.open(four.path(index)), 16) for index in (3, 0, 3)]
    assert torch.equal(views, torch.stack(expected))
    assert four.pixels([], 16).shape == (0, 3, 16, 16)


def test_subset_and_classes(four):
    assert four.subset([3, 2]).labels.tolist() == [0, 1]
    assert four.subset([3, 2]).domains == ("sketch", "photo")
    chosen = four.select_classes(["emu", "cat"])
    assert chosen.classes == ("emu", "cat")
    assert chosen.paths == ("0.png", "1.png", "3.png")
    assert chosen.labels.tolist() == [0, 1, 1]
    assert four.select_labels([1]).paths == ("2.png",)
    with pytest.raises(DataError, match="'yak'"):
        four.select_classes(["yak"])


def test_two_classes_of_one_name_are_chosen_by_label(four):
    twins = FileImages("t", ("crane", "crane"), "{}", four.root, four.paths[:2], torch.tensor([0, 1]))
    with pytest.raises(DataError, match="crane"):
        twins.select_classes(["crane"])
    assert twins.select_labels([1]).paths == ("1.png",)


def test_domains(four):
    assert select_domains(four, ["sketch"]).paths == ("1.png", "3.png")
    with pytest.raises(DataError, match="'clipart'"):
        select_domains(four, ["clipart"])


def test_lengths_must_agree(four):
    with pytest.raises(DataError, match=r"\b1\b.*\b2\b"):
        FileImages("x", ("a",), "{}", four.root, ("0.png",), torch.tensor([0, 0]))


def test_training_pixels_keep_aspect_and_are_large_enough(four):
    ready = TrainingPixels(four, 20)
    batch, sizes = ready.batch([3, 0, 2])
    assert ready.short_side == 29
    assert sizes.tolist() == [[29, 52], [29, 38], [16, 16]]  # height, width; the small one is left alone
    assert batch.shape == (3, 3, 29, 52)
    assert batch[2, :, 16:].max() == 0
    again, _ = ready.batch(torch.tensor([2]))
    assert torch.equal(again[0], batch[2, :, :16, :16])
    views = augment_batch(batch, 20, torch.Generator().manual_seed(0), sizes=sizes)
    assert views.shape == (3, 3, 20, 20)


def test_small_crops_get_larger_images(four):
    ready = TrainingPixels(four, 8, least_area=0.1)
    assert ready.short_side == 26  # a crop of a tenth of 26 x 26 pixels has 8.2 x 8.2
    assert ready.batch([0])[1].min() == 26
    feed = Feed(four, tiny_clip(), Recipe(scale=(0.25, 1.0)))
    assert feed.decoded.short_side == 2 * feed.size


def test_listed_images_keep_their_domains(four):
    listed = ListedImages(
        tuple(four.path(index) for index in range(4)), four.labels, four.classes, domains=four.domains
    )
    assert listed.subset([3, 2]).domains == ("sketch", "photo")
    for name in four.classes:
        assert listed.select_classes([name]).domains == four.select_classes([name]).domains
    assert listed.select_classes([four.classes[0]]).name == listed.name
    assert listed.pixels([], 8).shape == (0, 3, 8, 8)


def test_training_pixels_beyond_the_limit_are_decoded_each_time(four):
    free, tight = TrainingPixels(four, 20), TrainingPixels(four, 20, limit_bytes=1000)
    for indices in ([0, 1], [1, 1, 2], [3, 2, 1, 0]):
        for one, other in zip(free.batch(indices), tight.batch(indices), strict=True):
            assert torch.equal(one, other)
    four.path(2).unlink()
    assert tight.batch([2])[0].shape == (1, 3, 16, 16)  # 768 bytes: it fitted
    four.path(3).unlink()
    with pytest.raises(InputError, match=r"3\.png"):
        tight.batch([3])


def test_every_unreadable_image_is_listed_in_one_pass(four):
    four.path(1).write_text("not an image")
    four.path(3).write_bytes(four.path(3).read_bytes()[:200])
    with pytest.raises(DataError) as caught:
        check_images(four)
    assert "1.png" in str(caught.value)
    assert "3.png" in str(caught.value)
    report = check_images(four, "skip")
    assert [image.key for image in report.unreadable] == ["1.png", "3.png"]
    assert report.checked == 4
    assert report.kept.labels.tolist() == [2, 1]
    assert check_images(report.kept).unreadable == ()
    with pytest.raises(DataError, match=r"1\.png"):
        check_images(four.subset([1, 3]), "skip")
    with pytest.raises(UsageError, match="'ignore'"):
        check_images(four, "ignore")


def test_a_file_that_changed_within_its_size_and_time_has_another_digest(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"1234")
    state, first = path.stat(), file_digest(path)
    path.write_bytes(b"5678")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert file_digest(path) != first
