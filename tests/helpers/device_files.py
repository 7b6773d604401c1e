"""Image files for tests of views computed on a device."""

from __future__ import annotations

import io

from PIL import Image


def file_of(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
