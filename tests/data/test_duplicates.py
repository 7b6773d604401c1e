"""Copies, re-saved and mirrored images form one unit; flat and other images do not."""

from __future__ import annotations

import io
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from dear.data import draw_shots, open_data
from dear.data.duplicates import Prints, find_duplicates, find_file_duplicates, matching_pairs
from dear.data.images import ListedImages
from dear.data.shots import hold_out


def photo(seed: int) -> Image.Image:
    """A smooth random image."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.uniform(0, 255, (6, 6, 3)).astype(np.uint8))
    return coarse.resize((120, 90), Image.Resampling.BICUBIC)


def resaved(image: Image.Image, quality: int) -> Image.Image:
    content = io.BytesIO()
    image.save(content, "JPEG", quality=quality)
    return Image.open(content).convert("RGB")


def units(*images: Image.Image) -> list[int]:
    labels = torch.zeros(len(images), dtype=torch.int64)
    return find_duplicates(ListedImages(images, labels, ("cat",))).units.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_changed_copies_are_one_unit(seed: int) -> None:
    image = photo(seed)
    copies = (image, image.copy(), resaved(image, 40), image.resize((96, 72)), ImageOps.mirror(image))
    assert units(photo(100 + seed), *copies) == [0, 1, 1, 1, 1, 1]


def test_most_copies_of_small_images_with_fine_texture_are_found() -> None:
    """64 x 64 pixels, of which re-saving and resizing change more than of photos."""
    task = open_data("world:textures", "test")
    originals = [task.image(place).convert("RGB") for place in range(0, len(task), 25)]
    prints = Prints.of(originals)
    for change in (lambda image: resaved(image, 80), lambda image: image.resize((54, 54))):
        pairs = {
            (int(i), int(j))
            for first, second, _ in matching_pairs(prints, Prints.of([change(image) for image in originals]))
            for i, j in zip(first, second, strict=True)
        }
        assert all(i == j for i, j in pairs)
        assert len(pairs) > 0.7 * len(originals)


def test_numbers_of_copies() -> None:
    image = photo(0)
    items = (image, image, resaved(image, 50), ImageOps.mirror(image), photo(1))
    images = ListedImages(items, torch.zeros(5, dtype=torch.int64), ("cat",))
    duplicates = find_duplicates(images)
    assert (duplicates.copies, duplicates.near) == (1, 2)
    assert duplicates.pair() == (0, 1)
    sentence = duplicates.sentence(images.key)
    assert "3 of 5 images" in sentence
    assert f"{images.key(0)!r} and {images.key(1)!r}" in sentence


def test_small_patches_on_a_flat_ground_are_no_copies() -> None:
    images = []
    for place, color in (
        ((10, 10), (160, 120, 130)),
        ((70, 60), (120, 150, 100)),
        ((40, 80), (90, 128, 150)),
    ):
        image = Image.new("RGB", (100, 100), (128, 128, 128))
        image.paste(color, (*place, place[0] + 12, place[1] + 12))
        images.append(image)
    assert units(*images) == [0, 1, 2]
    gray = [Image.new("RGB", (50, 50), (level,) * 3) for level in (100, 104, 100)]
    assert units(*gray) == [0, 1, 0]


def test_the_search_needs_little_memory() -> None:
    rng = np.random.default_rng(0)
    count = 20_000
    hashes = rng.integers(0, 2**63, (count, 2), dtype=np.uint64)
    small = rng.integers(0, 255, (count, 32, 32, 3), np.uint8)
    hashes[-1, 0] = hashes[7, 0] ^ np.uint64(5)
    small[-1] = small[7]
    tracemalloc.start()
    found = [(int(a), int(b)) for first, second, _ in matching_pairs(Prints(small, hashes))
             for a, b in zip(first, second, strict=True)]  # fmt: skip
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [(7, count - 1)]
    assert peak < 150e6


def folder_with_copies(root: Path, classes: int = 3, each: int = 10) -> None:
    for label in range(classes):
        folder = root / f"class {label}"
        folder.mkdir(parents=True)
        for number in range(each):
            image = photo(100 * label + number)
            image.save(folder / f"{number}.png")
            if number % 4 == 0:
                shutil.copy(folder / f"{number}.png", folder / f"{number} (copy).png")
            elif number % 4 == 1:
                image.save(folder / f"{number} (small).jpg", quality=60)
            elif number % 4 == 2:
                ImageOps.mirror(image).save(folder / f"{number} (mirrored).png")


def test_no_copy_of_a_held_out_image_is_trained_on(tmp_path: Path) -> None:
    folder_with_copies(tmp_path / "photos")
    names = {}
    for split in ("train", "test"):
        images = open_data(tmp_path / "photos", split)
        names[split] = {images.key(i).split(" (")[0].split(".")[0] for i in range(len(images))}
        assert set(images.labels.tolist()) == {0, 1, 2}
    assert names["train"]
    assert not names["train"] & names["test"]


def test_missing_and_damaged_files_are_no_copies(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    photo(0).save(tmp_path / "good.png")
    paths = [tmp_path / name for name in ("bad.png", "good.png", "away.png", "gone.png")]
    assert find_file_duplicates(paths).units.tolist() == [0, 1, 2, 3]


def test_units_of_a_split() -> None:
    keys, groups = [f"{n}.jpg" for n in range(40)], ["cat"] * 20 + ["dog"] * 20
    pairs = [n // 2 for n in range(40)]
    held = hold_out(keys, groups, units=pairs)
    assert all(held[2 * n] == held[2 * n + 1] for n in range(20))
    assert sum(held[:20]) == sum(held[20:]) == 4
    assert not any(hold_out(["a", "b"], [0, 0], units=[1, 1]))  # nothing would be left to train on
    across = hold_out(["a", "b", "c", "d"], [0, 0, 1, 1], units=[0, 1, 1, 2])
    assert across[1] is across[2] is False


def test_shots_are_different_images_where_there_are_enough(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / "train" / name).mkdir(parents=True)
        for number in range(4):
            path = tmp_path / "photos" / "train" / name / f"{number}.png"
            photo(number + 10 * (name == "dog")).save(path)
            for copy in range(3):
                shutil.copy(path, path.with_name(f"{number} copy {copy}.png"))
    images = open_data(tmp_path / "photos", "train")
    for seed in range(5):
        drawn = {images.key(index).split(" copy")[0].split(".")[0] for index in draw_shots(images, 4, seed)}
        assert len(drawn) == 8
    assert len(draw_shots(images, 6, 1)) == 12


def test_boxes_of_damaged_files_are_no_copies(tmp_path: Path) -> None:
    for number in range(3):
        photo(number).save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes(b"no image")
    rows = [f"{file}.png,cat,0,0,20,{height}" for file in range(3) for height in (20, 30)]
    (tmp_path / "boxes.csv").write_text("\n".join(["path,label,x,y,width,height", *rows]))
    units = find_duplicates(open_data(tmp_path / "boxes.csv", "all")).units.tolist()
    assert units[2:4] == [2, 3]
    assert not {2, 3} & {*units[:2], *units[4:]}
