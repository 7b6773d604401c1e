"""Images to read: small, of one color each, so that what was read can be told from what was written."""

import pytest
from PIL import Image


@pytest.fixture
def paint(tmp_path):
    """Write images: paint("a/1.png", (255, 0, 0)); returns the folder they lie in."""

    def write(*paths, color=(10, 20, 30), size=(12, 8)):
        for path in paths:
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", size, color).save(place)
        return tmp_path

    return write
