"""The image reader, format by format."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from fuzzing import Target
from PIL import Image

from dear.images.open import MAX_PIXELS, open_image
from dear.images.views import square

_WORDS = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"IDAT",
    b"IHDR",
    b"tRNS",
    b"iCCP",
    b"acTL",
    b"Exif\0\0",
    b"II*\0",
)
_WORDS += (
    b"MM\0*",
    b"GIF89a",
    b"RIFF",
    b"WEBPVP8X",
    b"ANMF",
    b"BM",
    b"P5\n",
    b"P6\n",
    b"P7\n",
    b"65535",
    b"ftypavif",
)


def _encoded(kind: str, **options: object) -> bytes:
    """A small image of a mode, encoded."""
    rng = np.random.default_rng(3)
    mode = str(options.pop("mode", "RGB"))
    values = rng.integers(0, 255, (9, 13, 4), dtype=np.uint8)
    image = (
        Image.fromarray(values, "RGBA") if mode == "RGBA" else Image.fromarray(values[..., :3]).convert(mode)
    )
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), (40 * n, 0, 0)) for n in range(4)]
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


def _turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return _encoded("JPEG", exif=exif.tobytes())


def _sixteen() -> bytes:
    file = io.BytesIO()
    Image.fromarray((np.arange(99, dtype=np.uint16) * 600).reshape(9, 11)).save(file, "PNG")
    return file.getvalue()


def _target(kind: str, seeds: list[bytes]) -> Target:
    def read(data: bytes) -> None:
        image = open_image(data)
        assert image.mode == "RGB"
        assert 0 < image.width * image.height <= MAX_PIXELS
        assert square(image, 16).size == (16, 16)

    return Target(f"image-{kind}", seeds, read, words=_WORDS)


def jpeg(folder: Path) -> Target:
    seeds = [_encoded("JPEG"), _encoded("JPEG", mode="L"), _encoded("JPEG", mode="CMYK"), _turned()]
    return _target("jpeg", [*seeds, _encoded("JPEG", progressive=True)])


def png(folder: Path) -> Target:
    seeds = [
        _encoded("PNG"),
        _encoded("PNG", mode="RGBA"),
        _encoded("PNG", mode="P"),
        _encoded("PNG", mode="1"),
    ]
    return _target("png", [*seeds, _encoded("PNG", mode="LA"), _animated("PNG"), _sixteen()])


def gif(folder: Path) -> Target:
    return _target("gif", [_encoded("GIF"), _animated("GIF"), _encoded("GIF", mode="L", transparency=3)])


def webp(folder: Path) -> Target:
    seeds = [_encoded("WEBP"), _encoded("WEBP", mode="RGBA", lossless=True), _animated("WEBP")]
    return _target("webp", seeds)


def tiff(folder: Path) -> Target:
    seeds = [
        _encoded("TIFF"),
        _encoded("TIFF", compression="tiff_lzw"),
        _encoded("TIFF", compression="tiff_deflate"),
    ]
    return _target("tiff", [*seeds, _encoded("TIFF", mode="I;16"), _encoded("TIFF", compression="jpeg")])


def bmp(folder: Path) -> Target:
    return _target("bmp", [_encoded("BMP"), _encoded("BMP", mode="P"), _encoded("BMP", mode="1")])


def ppm(folder: Path) -> Target:
    return _target(
        "ppm", [_encoded("PPM"), _encoded("PPM", mode="L"), b"P2\n2 2\n255\n0 1 2 3\n", b"P3 1 1 9 1 2 3 "]
    )


def avif(folder: Path) -> Target:
    return _target("avif", [_encoded("AVIF", speed=10), _encoded("AVIF", mode="RGBA", speed=10)])


TARGETS = {f"image-{kind.__name__}": kind for kind in (jpeg, png, gif, webp, tiff, bmp, ppm, avif)}
