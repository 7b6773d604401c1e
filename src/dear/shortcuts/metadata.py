"""Metadata of image files that their pixels do not show: bytes, format, camera, JPEG tables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from dear.data.images import ImageSet
from dear.utils.digest import of_parts

_MAKE, _MODEL = 0x010F, 0x0110  # EXIF tags


@dataclass(frozen=True)
class FileMetadata:
    """Metadata of an image file."""

    bytes_per_pixel: float  #: bytes over the number of pixels
    format: str  #: "JPEG", "PNG", …
    camera: str = ""  #: maker and model from EXIF; empty: not recorded
    tables: str = ""  #: short hash of the JPEG quantization tables; empty: not a JPEG
    quality: int | None = None  #: estimated JPEG quality (1 to 100); None: not a JPEG


def read_metadata(images: ImageSet, index: int) -> FileMetadata | None:
    """Metadata of the file of an image; None for an image without a file."""
    path = image_path(images, index)
    if path is None:
        return None
    try:
        with Image.open(path) as image:
            camera = " ".join(str(image.getexif().get(tag, "")).strip(" \0") for tag in (_MAKE, _MODEL))
            tables = getattr(image, "quantization", None) or {}
            return FileMetadata(
                os.path.getsize(path) / max(1, image.width * image.height),
                str(image.format),
                " ".join(camera.split())[:60],
                of_parts(repr(sorted(tables.items()))).hex()[:8] if tables else "",
                jpeg_quality(tables[min(tables)]) if tables else None,
            )
    except Exception:  # a decoder may raise anything; unreadable images are reported elsewhere
        return None


def image_path(images: ImageSet, index: int) -> Path | None:
    """The file of an image; None if it has none."""
    path = getattr(images, "path", None)
    if callable(path):
        file: Path = path(index)
        return file
    item = getattr(images, "items", {index: None})[index]
    return Path(item) if isinstance(item, str | os.PathLike) else None


def jpeg_quality(table: list[int]) -> int:
    """Quality (1 to 100) at which the JPEG group's encoder writes a luminance table of this size."""
    # The standard table has a mean of 57.6; a quality q below 50 scales it by 50 / q, above by 2 - q / 50.
    scale = float(np.mean(table)) / 57.625
    return int(np.clip(round(50 / scale if scale > 1 else 100 - 50 * scale), 1, 100))
