"""The reader of image files against Pillow: the same rules, and pixels within 1 of 255 after resizing."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import tiny_clip

from dear.data.images import TEMPLATE, FileImages
from dear.errors import InputError
from dear.images import jpeg
from dear.images.open import open_image, open_pixels
from dear.images.resample import resample, resample_numpy
from dear.images.views import View, read_views, resize_crop, square, view_pixels
from dear.train.crops import augment_image
from dear.utils import parallel as batches


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def photo(width: int = 90, height: int = 60) -> Image.Image:
    """Smooth enough that JPEG keeps it, with an own color in each corner."""
    return noise(6, 4, seed=1).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def by_pillow(image: Image.Image, view: View) -> np.ndarray:
    """The view as Pillow alone makes it."""
    filtered = Image.Resampling.BILINEAR if view.bilinear else Image.Resampling.BICUBIC
    (width, height), side = image.size, view.size
    if view.squash:
        return np.asarray(image.resize((side, side), filtered)).astype(int)
    long = int(side * max(width, height) / min(width, height))
    image = image.resize((side, long) if width <= height else (long, side), filtered)
    left, top = round((image.width - side) / 2), round((image.height - side) / 2)
    return np.asarray(image.crop((left, top, left + side, top + side))).astype(int)


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("bilinear", [False, True])
@pytest.mark.parametrize("binary", [False, True])
def test_views_are_pillows_to_one_step(squash: bool, bilinear: bool, binary: bool) -> None:
    shapes = [(300, 200), (201, 333), (64, 64), (24, 24), (7, 5), (1, 1), (1, 9), (9, 1), (25, 23), (400, 31)]
    for number, shape in enumerate(shapes):
        image = noise(*shape, seed=number)
        if binary:  # the hardest edges there are
            image = image.point(lambda value: 255 * (value > 127))
        for side in (1, 17, 24, 65):
            view = View(side, squash, bilinear)
            got = view_pixels(image, view).astype(int)
            assert np.abs(got - by_pillow(image, view)).max() <= 1, (shape, side)


def test_without_pytorch_the_bytes_are_the_same() -> None:
    random = np.random.default_rng(0)
    for _ in range(60):
        height, width = random.integers(1, 200, 2)
        down, across = random.integers(1, height + 1), random.integers(1, width + 1)
        image = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        for bilinear in (False, True):
            got = resample_numpy(image, int(across), int(down), bilinear)
            assert np.array_equal(got, resample(image, int(across), int(down), bilinear))
    tall = random.integers(0, 256, (9, 4, 3), dtype=np.uint8)  # bilinear may enlarge, too
    assert np.array_equal(resample_numpy(tall, 40, 31, True), resample(tall, 40, 31, True))


def test_a_process_without_pytorch_reads_the_same_view(tmp_path: Path) -> None:
    photo(300, 200).save(tmp_path / "a.jpg")
    program = (
        "import sys; from dear.images.views import view_pixels\n"
        f"sys.stdout.buffer.write(view_pixels({str(tmp_path / 'a.jpg')!r}, 64).tobytes())\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == view_pixels(tmp_path / "a.jpg", 64).tobytes()


def jpegs() -> dict[str, bytes]:
    files = {
        "plain": encoded(photo()),
        "odd size": encoded(photo(91, 61), subsampling=2),
        "full color": encoded(photo(), subsampling=0, quality=98),
        "progressive": encoded(photo(), progressive=True),
        "gray": encoded(photo().convert("L")),
        "cmyk": encoded(photo().convert("CMYK")),
        "rgb": encoded(photo(), keep_rgb=True),
        "one pixel": encoded(photo(1, 1)),
        "two images": encoded(photo(), "MPO", save_all=True, append_images=[photo(30, 20)]),
        "more behind it": encoded(photo()) + b"\xff\xda junk" * 200,
    }
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        files[f"orientation {orientation}"] = encoded(photo(), exif=exif)
    return files


@pytest.mark.parametrize("name", list(jpegs()))
def test_jpeg_files_have_the_pixels_that_pillow_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = jpegs()[name]
    fast = open_pixels(content)
    assert np.array_equal(fast, np.asarray(open_image(content)))
    monkeypatch.setattr(jpeg, "simplejpeg", None)
    assert np.array_equal(fast, open_pixels(content))


def test_ordinary_jpegs_are_not_left_to_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    contents = [jpegs()[name] for name in ("plain", "progressive", "gray", "orientation 6")]
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("Pillow decodes"))
    for content in contents:
        open_pixels(content)


def many_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan stands there so often."""
    content = encoded(photo(), progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * count + content[-2:]


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jpg"
    path.write_bytes(many_scans(2000))
    for source in (path, path.read_bytes()):
        for read in (open_image, open_pixels):
            with pytest.raises(InputError, match=r"\b100\b"):
                read(source)
    assert not jpeg.too_many_scans(encoded(photo(), progressive=True))
    assert not jpeg.too_many_scans(many_scans(50))


def test_scan_marks_inside_of_other_data_are_no_scans() -> None:
    profile = b"\xff\xda" * 1000
    content = encoded(photo(), icc_profile=profile) + profile
    assert np.array_equal(open_pixels(content), np.asarray(photo_of(content)))


def photo_of(content: bytes) -> Image.Image:
    with Image.open(io.BytesIO(content)) as image:
        return image.convert("RGB")


def test_one_sentence_for_each_bad_file(tmp_path: Path) -> None:
    whole = encoded(noise(80, 60))
    contents = {
        "good.jpg": whole,
        "cut.jpg": whole[: len(whole) // 2],
        "empty.jpg": b"",
        "text.jpg": b"no image",
        "start.jpg": b"\xff\xd8\xff",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    paths = [tmp_path / name for name in (*contents, "missing.jpg")]
    assert torch.equal(read_views(paths[:1], 16)[0], resize_crop(whole, 16))
    for path in paths[1:]:
        with pytest.raises(InputError, match=re.escape(str(path))):
            read_views([paths[0], path], 16)
    with pytest.raises(InputError, match=r"cut\.jpg"):
        FileImages("x", ("a",), TEMPLATE, tmp_path, ("cut.jpg",), torch.zeros(1).long()).pixels([0], 16)


def test_views_do_not_share_the_decoders_buffer() -> None:
    first = view_pixels(encoded(photo(16, 16)), 16)
    before = first.copy()
    view_pixels(encoded(noise(16, 16)), 16)
    assert np.array_equal(first, before)
    pixels = open_pixels(encoded(photo(16, 16)))
    open_pixels(encoded(noise(16, 16)))
    assert np.array_equal(pixels, before)


def test_no_images_are_an_empty_batch() -> None:
    assert read_views([], View(16)).shape == (0, 3, 16, 16)


def test_views_are_read_under_inference_mode() -> None:
    with torch.inference_mode():
        assert torch.equal(read_views([photo()] * 3, 16)[2], resize_crop(photo(), 16))


def turned_photo(kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(photo().transpose(Image.Transpose.ROTATE_90), kind, exif=exif)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_open_image_is_seen_as_its_file(kind: str) -> None:
    """Cameras store a turned image and a note that says so."""
    content, clip = turned_photo(kind), tiny_clip(dtype=torch.float32)
    given = Image.open(io.BytesIO(content))
    assert torch.equal(resize_crop(given, 24), resize_crop(content, 24))
    assert torch.equal(clip.preprocess(given), clip.preprocess(open_image(content)))
    assert np.array_equal(np.asarray(square(given, 24)), view_pixels(content, 24))
    views = [
        augment_image(image, 24, torch.Generator().manual_seed(0)) for image in (given, open_image(content))
    ]
    assert torch.equal(*views)


def test_a_transparent_color_of_an_open_image_is_white() -> None:
    given = Image.open(
        io.BytesIO(encoded(Image.new("RGB", (8, 8), (9, 8, 7)), "PNG", transparency=(9, 8, 7)))
    )
    assert given.mode == "RGB"
    assert resize_crop(given, 4).unique().tolist() == [255]
    assert augment_image(given, 4, torch.Generator().manual_seed(0)).unique().tolist() == [255]


@pytest.mark.parametrize("highest", [255, 65535])
def test_gray_in_32_bits_has_the_depth_of_its_numbers(highest: int) -> None:
    values = np.linspace(0, highest, 64).round().astype(np.int32).reshape(8, 8)
    content = encoded(Image.fromarray(values), "TIFF")
    expected = np.round(values / highest * 255)
    assert np.abs(np.asarray(open_image(content))[:, :, 0] - expected).max() <= 1
    dark = encoded(Image.fromarray(values.clip(max=255).astype(np.uint16)), "PNG")
    assert np.asarray(open_image(dark)).max() == 1  # 16 bits by format: nearly black is nearly black


def test_threads_keep_the_order_and_raise_the_error_of_the_first_item_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "usable_cores", lambda: 4)
    assert batches.map_threads(lambda number: number * number, range(50)) == [n * n for n in range(50)]
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number in (3, 4, 5):
            time.sleep(0.02 * (6 - number))  # later items fail sooner
            raise InputError(f"item {number}")
        time.sleep(0.001)
        return number

    with pytest.raises(InputError, match="item 3"):
        batches.map_threads(work, range(1000))
    assert len(begun) < 1000
