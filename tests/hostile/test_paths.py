"""Tables, splits and lists that point outside their folder: refused, the row named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from PIL import Image

import dear
from dear.data import open_data
from dear.data.open import BENCHMARKS, open_benchmark
from dear.errors import DataError, DearError, InputError
from dear.export.runtime import OnnxModel
from dear.heads.roles import RoleMap
from dear.images.open import open_image
from dear.runs.folder import load_run
from dear.tasks.retrieve import gallery_of

OUTSIDE = [
    "/etc/passwd",
    "../secret.png",
    "a/../../secret.png",
    "..\\secret.png",
    "C:\\secret.png",
    "c:secret.png",
    "linked/secret.png",
    "link.png",
    "",
    ".",
    "a/..",
    "a.png\0.jpg",
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with two links out of it, beside an image that is nobody's business."""
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    inner = tmp_path / "data"
    inner.mkdir()
    Image.new("RGB", (8, 8)).save(inner / "a.png")
    (inner / "link.png").symlink_to(tmp_path / "secret.png")
    (inner / "linked").symlink_to(tmp_path)
    return inner


def home_of(name: str, root: Path, tmp_path: Path) -> Path:
    """A benchmark's folder whose images are `root`: a dataset may itself be a link."""
    benchmark = BENCHMARKS[name]
    home = tmp_path / "root" / benchmark.folder
    home.mkdir(parents=True)
    (home / benchmark.images).symlink_to(root)
    return home


@pytest.mark.parametrize("path", OUTSIDE)
def test_split_files_stay_in_their_folder(root: Path, tmp_path: Path, path: str) -> None:
    home = home_of("EuroSAT", root, tmp_path)
    table = {"train": [["a.png", 0, "x"], [path, 1, "y"]], "val": [], "test": []}
    (home / BENCHMARKS["EuroSAT"].split).write_text(json.dumps(table))
    with pytest.raises(DataError, match="train row 2"):
        open_benchmark("EuroSAT", "train", tmp_path / "root")


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret", "linked/secret", "C:x", "a/../../b"])
def test_lists_of_images_stay_in_their_folder(root: Path, tmp_path: Path, path: str) -> None:
    home = home_of("FGVCAircraft", root, tmp_path)
    (home / "variants.txt").write_text("x\ny\n")
    for split in ("train", "val", "test"):
        (home / f"images_variant_{split}.txt").write_text(f"a x\n{path} y\n")
    with pytest.raises(DataError, match="line 2"):
        open_benchmark("FGVCAircraft", "train", tmp_path / "root")


def test_a_root_that_is_a_link_may_be_read(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(root)
    (root / "t.csv").write_text("path,label\na.png,x\n")
    assert open_data(tmp_path / "elsewhere" / "t.csv", "all").image(0).size == (8, 8)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_images_that_are_pipes_or_devices_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    for name in ("pipe.jpg", "zero.jpg"):
        with pytest.raises(InputError, match=name):
            open_image(tmp_path / name)


def test_folders_that_go_in_circles_end(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / "a.png")
        (tmp_path / "photos" / name / "again").symlink_to(tmp_path / "photos")
    assert len(open_data(tmp_path / "photos", "all")) == 2


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX alone")
def test_names_that_are_no_text_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8)).save(folder / name / f"{number}.png")
    os.rename(folder / "cat" / "0.png", os.fsencode(folder / "cat") + b"/\xff.png")
    with pytest.raises(DataError, match="UTF-8"):
        open_data(folder, "all")
    with pytest.raises(DataError, match="UTF-8"):
        gallery_of(folder)
    os.rename(os.fsencode(folder / "cat") + b"/\xff.png", folder / "cat" / "0.png")
    os.rename(folder / "cat", os.fsencode(folder) + b"/\xff")
    with pytest.raises(DataError, match=r"U\+DCFF"):
        open_data(folder, "all")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "x/" * 3000])
def test_names_that_no_disk_can_hold(name: str, tmp_path: Path) -> None:
    for read in (open_data, dear.load, RoleMap.load, load_run, open_image, OnnxModel):
        with pytest.raises(DearError):
            read(name)
