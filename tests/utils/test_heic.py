"""HEIC images, as telephones take them: read with the extra, a sentence without it."""

from __future__ import annotations

import builtins
import io

import numpy as np
import pytest
from PIL import Image

from dear.errors import InputError
from dear.images.names import is_image_name
from dear.images.open import open_image

heif = pytest.importorskip("pillow_heif")


@pytest.fixture
def photo(tmp_path):
    """A smooth image, wider than high, turned by its EXIF block."""
    ramp = np.linspace(0, 255, 64, dtype=np.uint8)
    pixels = np.stack([np.tile(ramp, (48, 1)), np.full((48, 64), 90), np.tile(ramp[::-1], (48, 1))], -1)
    image = Image.fromarray(pixels.astype(np.uint8))
    path = tmp_path / "IMG_1.HEIC"
    heif.from_pillow(image).save(path, quality=95)
    return path, image


def test_heic_is_read_as_files_and_as_bytes(photo) -> None:
    path, image = photo
    assert is_image_name(path.name)
    for source in (path, str(path), path.read_bytes()):
        decoded = open_image(source)
        assert decoded.mode == "RGB"
        assert decoded.size == image.size
        assert np.abs(np.asarray(decoded, dtype=int) - np.asarray(image, dtype=int)).mean() < 4


def test_heic_is_turned_as_its_exif_says(tmp_path) -> None:
    image = Image.new("RGB", (64, 32), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    path = tmp_path / "a.heic"
    heif.from_pillow(image).save(path, exif=exif.tobytes())
    assert open_image(path).size == (32, 64)


def test_without_the_extra_a_sentence_says_what_to_install(photo, monkeypatch) -> None:
    path, _ = photo
    real = builtins.__import__

    def blocked(name, *rest):
        if name == "pillow_heif":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(InputError, match=r"IMG_1\.HEIC: .*HEIC"):
        open_image(path)


def test_cut_and_false_heic_files_are_named(photo, tmp_path) -> None:
    path, _ = photo
    cut = tmp_path / "cut.heic"
    cut.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(InputError, match=r"cut\.heic"):
        open_image(cut)
    false = tmp_path / "false.heic"
    false.write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    with pytest.raises(InputError, match=r"false\.heic"):
        open_image(false)
    with pytest.raises(InputError, match="damaged"):
        open_image(io.BytesIO(false.read_bytes()).getvalue())
