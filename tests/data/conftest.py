"""Images to read: small, of one color each, so that what was read can be told from what was written."""

import zlib

import pytest
from PIL import Image


@pytest.fixture
def paint(tmp_path):
    """Write images, each with a color of its path unless one is named; returns the folder they lie in."""

    def write(*paths, color=None, size=(12, 8)):
        for path in paths:
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            default_color = tuple(zlib.crc32(str(path).encode()).to_bytes(4, "big")[:3])
            Image.new("RGB", size, color or default_color).save(file)
        return tmp_path

    return write
