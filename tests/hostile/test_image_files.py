"""Images made to fill memory, to end early, or to be something else than they say."""

from __future__ import annotations

import io
import re
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from dear.data import open_data
from dear.data.unreadable import check_images
from dear.errors import DataError, InputError
from dear.images.open import MAX_PIXELS, open_image
from dear.images.views import square
from dear.studio.classify import open_uploads, readable_uploads


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, body: bytes, mode: int = 2) -> bytes:
    """A PNG that says it is so wide and so high, whatever its body holds."""
    head = struct.pack(">IIBBBBB", width, height, 8, mode, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


RGB = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("width", "height"), [(100_000, 100_000), (2**31 - 1, 2**31 - 1), (20_000, 20_000), (1, 2**31 - 1)]
)
def test_bombs_are_refused_before_memory_is_taken(width: int, height: int) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in (png(width, height, zlib.compress(b"\0" * 1000)), b"P6\n%d %d\n255\n" % (width, height)):
        with pytest.raises(InputError):
            open_image(data)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (
        1 if sys.platform == "darwin" else 1024
    )
    assert grown < 100_000_000


def test_images_beyond_our_own_limit_are_refused_where_pillow_only_warns() -> None:
    for data in (png(12_000, 10_000, zlib.compress(b"\0" * 1000)), b"P6\n12000 10000\n255\n"):
        with pytest.raises(InputError, match="12000 x 10000"):
            open_image(data)


def test_a_line_of_millions_of_pixels_is_refused() -> None:
    """322 bytes of animated WebP, 8,323,080 pixels wide, kept a decoder busy for many seconds."""
    frames = [Image.new("RGB", (16, 8), (60 * n, 0, 0)) for n in range(4)]
    data = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    at = data.index(b"VP8X") + 12
    wide = data[:at] + (8_323_080 - 1).to_bytes(3, "little") + data[at + 3 :]
    for stretched in (wide, b"P6\n70000 1\n255\n" + b"\0" * 210_000):
        with pytest.raises(InputError, match="65,535"):
            open_image(stretched)


def test_a_bomb_of_allowed_size_in_a_studio_upload_is_counted(tmp_path: Path) -> None:
    side = 6000  # 36 million pixels an image in a few kilobytes
    Image.new("1", (side, side)).save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"a\.png"):
        open_uploads([str(tmp_path / "a.png")] * 3)
    assert 2 * side**2 < MAX_PIXELS < 3 * side**2
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"a\.png"):  # one broken file does not lift the limit
        readable_uploads([str(tmp_path / "broken.png"), *[str(tmp_path / "a.png")] * 3])


def test_text_in_a_png_does_not_grow() -> None:
    notes = PngImagePlugin.PngInfo()
    notes.add_text("a", "x" * 3_000_000, zip=True)
    with pytest.raises(InputError):
        open_image(encoded(RGB, "PNG", pnginfo=notes))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF"])
def test_cut_images_are_refused_at_every_length(kind: str) -> None:
    data = encoded(RGB, kind)
    assert open_image(data).size == RGB.size
    for share in (0.0, 0.01, 0.3, 0.6, 0.9):
        with pytest.raises(InputError):
            open_image(data[: int(len(data) * share)])


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    frames = [
        Image.new("RGB", (16, 16), (255, 0, 0)),
        *(Image.new("RGB", (16, 16), (0, 0, 99 + n)) for n in range(40)),
    ]
    image = open_image(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))
    red, green, blue = image.getpixel((8, 8))
    assert red > 200
    assert green < 60
    assert blue < 60


STEPS = {"I;16": "L", "RGBa": "RGBA", "La": "LA", "PA": "LA"}  # Pillow converts to these in two steps
MODES = ("1", "L", "P", "LA", "PA", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "La", "RGBa", "I;16", "I")


@pytest.mark.parametrize("mode", MODES)
def test_odd_modes_become_rgb(mode: str) -> None:
    image = open_image(RGB.convert(STEPS.get(mode, "RGB")).convert(mode))
    assert image.mode == "RGB"
    assert image.size == RGB.size
    assert square(image, 8).size == (8, 8)


def test_floating_point_images_are_refused_with_their_nan() -> None:
    values = np.full((8, 8), np.nan, dtype=np.float32)
    for image in (Image.fromarray(values), encoded(Image.fromarray(values), "TIFF")):
        with pytest.raises(InputError, match="floating-point"):
            open_image(image)
    with pytest.raises(InputError, match="32-bit"):
        open_image(Image.fromarray(np.full((8, 8), 2**30, dtype=np.int32)))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jpg", b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"),
        ("a.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%touch ran) (w) file\n"),
        ("a.gif", b"%PDF-1.7\n"),
        ("a.jpg", b"PK\x03\x04" + b"\0" * 100),
        ("a.jpg", b"\x7fELF" + b"\0" * 100),
        ("a.webp", b"#!/bin/sh\ntouch ran\n"),
        ("a.jpg", b""),
        ("a.jpg", b"\0" * 1000),
        ("a.bmp", b"\x00\x00\x01\x00" + b"\0" * 100),
    ],
)
def test_what_is_no_image_is_said_to_be_none(tmp_path: Path, monkeypatch, name: str, data: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=re.escape(name)):
        open_image(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_lying_extensions_do_not_matter(tmp_path: Path) -> None:
    for kind, ending in (("PNG", "jpg"), ("JPEG", "png"), ("GIF", "webp"), ("BMP", "gif")):
        (tmp_path / f"a.{ending}").write_bytes(encoded(RGB, kind))
        assert open_image(tmp_path / f"a.{ending}").size == RGB.size


def test_absurdly_long_images_are_cut_to_their_middle() -> None:
    assert square(Image.new("RGB", (60_000, 1)), 224).size == (224, 224)
    assert square(Image.new("RGB", (1, 60_000)), 224).size == (224, 224)


def test_one_bad_image_is_named_and_may_be_skipped(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        RGB.save(tmp_path / name / "good.png")
        (tmp_path / name / "bad.jpg").write_bytes(encoded(RGB, "JPEG")[:300])
    images = open_data(tmp_path, "all")
    with pytest.raises(DataError, match=r"cat/bad\.jpg(.|\n)*dog/bad\.jpg"):
        check_images(images)
    assert len(check_images(images, "skip").kept) == 2
