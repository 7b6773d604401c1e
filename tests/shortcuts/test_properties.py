"""Properties of images against numpy, Pillow and files written for the purpose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from dear.data.duplicates import difference_hash
from dear.data.images import ListedImages
from dear.errors import UsageError
from dear.shortcuts.edits import recompress
from dear.shortcuts.metadata import read_metadata
from dear.shortcuts.properties import (
    PROPERTIES,
    blockiness,
    measure_properties,
    properties_of,
    property_column,
)


def value(image: Image.Image, name: str) -> float:
    return float(properties_of(image)[property_column(name)])


def test_values_of_a_plain_image() -> None:
    image = Image.new("RGB", (200, 100), (90, 60, 30))
    expected = {
        "brightness": 60, "contrast": 0, "darkest pixels": 60, "brightest pixels": 60, "saturation": 60,
        "red": 30, "blue": -30, "edge red": 90, "edge green": 60, "edge blue": 30, "edge brightness": 60,
        "edge spread": 0, "width": 200, "aspect": 2, "sharpness": np.log(1e-3),
    }  # fmt: skip
    for name, expected_value in expected.items():
        assert value(image, name) == pytest.approx(expected_value, abs=1e-6), name


def test_the_edge_is_four_of_128_pixels() -> None:
    pixels = np.zeros((128, 128, 3), dtype=np.uint8)
    pixels[4:-4, 4:-4] = 255
    image = Image.fromarray(pixels)
    assert value(image, "edge brightness") == 0
    assert value(image, "brightness") == pytest.approx(255 * 120**2 / 128**2)


def test_blur_and_compression_are_seen(photos: ListedImages) -> None:
    image = photos.image(0)
    assert value(image.filter(ImageFilter.GaussianBlur(2)), "sharpness") < value(image, "sharpness") - 1
    assert blockiness(recompress(image, 10)) > 1.3 > blockiness(image)
    cropped = recompress(image, 10).crop((3, 5, image.width, image.height))
    assert blockiness(cropped) > 1.3  # wherever the grid starts


def test_an_unknown_property_is_refused() -> None:
    with pytest.raises(UsageError, match="brightness"):
        property_column("smell")


def test_measured_sets(photos: ListedImages) -> None:
    done = []
    few = photos.subset([3, 5])
    measured = measure_properties(few, lambda stage, n, total: done.append((n, total)))
    assert measured.values.shape == (2, len(PROPERTIES))
    assert np.allclose(measured.values[1], properties_of(photos.image(5)))
    assert measured.small.shape == (2, 32, 32, 3)
    assert int(measured.hashes[0, 0]) == difference_hash(photos.image(3))
    assert measured.files == (None, None)
    assert done[-1] == (2, 2)


def test_facts_of_files(tmp_path, photos: ListedImages) -> None:
    image = photos.image(0)
    exif = Image.Exif()
    exif[0x010F], exif[0x0110] = "Maker", "Model 1"
    image.save(tmp_path / "a.jpg", quality=30, exif=exif)
    image.save(tmp_path / "b.jpg", quality=90)
    image.save(tmp_path / "c.png")
    (tmp_path / "d.jpg").write_bytes(b"no image")
    files = ListedImages(tuple(tmp_path / name for name in ("a.jpg", "b.jpg", "c.png", "d.jpg")),
                         torch.zeros(4, dtype=torch.int64), ("x",))  # fmt: skip
    first, second, third, damaged = (read_metadata(files, index) for index in range(4))
    assert first is not None
    assert second is not None
    assert third is not None
    assert damaged is None
    assert (first.format, first.camera, third.format, third.tables) == ("JPEG", "Maker Model 1", "PNG", "")
    assert abs((first.quality or 0) - 30) <= 2
    assert abs((second.quality or 0) - 90) <= 2
    assert first.tables != second.tables
    size = (tmp_path / "a.jpg").stat().st_size
    assert first.bytes_per_pixel == pytest.approx(size / (image.width * image.height))
