"""Any ordinary image file as upright 8-bit RGB.

Two choices that CLIP's code leaves open: transparent images get a white background (dropping the alpha
channel, as `convert("RGB")` does, shows whatever colors are below it), and 16-bit gray is scaled to
8 bit (`convert("RGB")` clips it to white).
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from dear.errors import InputError
from dear.images import jpeg
from dear.images.resample import Pixels
from dear.utils.extras import install_command

ImageLike = str | os.PathLike[str] | bytes | Image.Image  #: a file, the bytes of one, or a Pillow image

# 100 megapixels: 300 MB as RGB. Pillow refuses by itself only what is twice its limit.
MAX_PIXELS = 100_000_000
MAX_SIDE = 65_535  # JPEG's limit; some decoders take long for a line of millions of pixels
MAX_JPEG_BYTES = 1 << 29  # more than 100 megapixels at the highest quality
# Only these decoders are used; others start outside programs (EPS) or read formats that are no photographs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
_HEIF_BRANDS = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"))
# Without O_NONBLOCK, opening a pipe would wait for a writer.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_JPEG_NAMES = (".jpg", ".jpeg", ".JPG", ".JPEG")
_ORIENTATION = 0x112  # EXIF's tag
# Pillow would warn about images below our limit. The filter is set once, not around each open, because it
# applies to all threads.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def open_image(source: ImageLike) -> Image.Image:
    """The image as upright 8-bit RGB, of an animation the first frame.

    EXIF rotation is applied; palette, gray, CMYK and 16-bit images are converted; transparent images get a
    white background.

    Args:
        source: a path, the bytes of a file, or an open Pillow image (not changed).

    Raises:
        InputError: the file is missing, empty, truncated, no image, or larger than `MAX_PIXELS`; it is named.

    >>> open_image(Image.new("L", (4, 3), 7)).getpixel((0, 0))
    (7, 7, 7)
    """
    with _translate_errors(source):
        content, _ = _read_jpeg(source)
        with _open_pillow(source, content) as image:
            return _load_rgb(image, _name(source))


def open_pixels(source: ImageLike, scratch: bool = False) -> Pixels:
    """`open_image` as an array; ordinary JPEG files are decoded without Pillow.

    With `scratch`, the next call of this thread may overwrite the result.
    """
    with _translate_errors(source):
        content, header = _read_jpeg(source)
        if content is not None and header is not None and header.colors in (1, 3) and header.depth == 8:
            _check_size((header.width, header.height), _name(source))
            pixels = jpeg.decode(content, header.width, header.height, scratch)
            if pixels is not None:
                return jpeg.rotate_upright(pixels, _orientation(content)) if header.has_metadata else pixels
        with _open_pillow(source, content) as image:
            return np.array(_load_rgb(image, _name(source)))


@dataclass(frozen=True)
class PlainJpeg:
    """A JPEG file that needs nothing but decoding and, perhaps, turning."""

    content: bytes
    width: int
    height: int
    orientation: int  #: EXIF's number; 1 is upright


def plain_jpeg(source: ImageLike) -> PlainJpeg | None:
    """A file that all decoders decode alike; None for any other, which `open_pixels` reads.

    Raises:
        InputError: as `open_image`, where it is known before decoding.
    """
    with _translate_errors(source):
        content, header = _read_jpeg(source)
        if content is None or header is None or not header.plain or not jpeg.is_complete(content):
            return None
        _check_size((header.width, header.height), _name(source))
        return PlainJpeg(
            content, header.width, header.height, _orientation(content) if header.has_metadata else 1
        )


def _load_rgb(image: Image.Image, name: str) -> Image.Image:
    _check_size(image.size, name)
    depth = 16 if image.format in ("PNG", "PPM") else 0
    image.load()
    return _to_rgb(_rotate_upright(image), name, depth)


def _check_size(size: tuple[int, int], name: str) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise InputError(
            f"{name}: an image must have at most {MAX_PIXELS:,} pixels, got {width} x {height}; shrink it"
        )
    if max(width, height) > MAX_SIDE:
        raise InputError(
            f"{name}: a side must be at most {MAX_SIDE:,} pixels, got {width} x {height}; shrink it"
        )


@contextmanager
def _translate_errors(source: ImageLike) -> Iterator[None]:
    """Convert any error to an InputError that names the image."""
    name = _name(source)
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        address = "://" in name
        what = "an address, not a file; download the image first" if address else "no such image"
        raise InputError(f"{name}: {what}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InputError(
            f"{name}: an image must have at most {MAX_PIXELS:,} pixels, got more; shrink it"
        ) from None
    except UnidentifiedImageError:
        raise InputError(f"{name}: {describe_non_image(source)}") from None
    except IsADirectoryError:
        raise InputError(f"{name}: is a folder, not an image") from None
    except PermissionError:
        raise InputError(f"{name}: permission denied; change its permissions") from None
    except Exception as error:  # decoders raise many kinds of errors on hostile or truncated data
        raise InputError(
            f"{name}: the image is damaged or truncated ({error}); replace or remove it"
        ) from error


def _name(source: ImageLike) -> str:
    """Name of a source in messages."""
    if isinstance(source, bytes):
        return f"image of {len(source):,} bytes"
    if isinstance(source, Image.Image):
        return str(getattr(source, "filename", "")) or "image in memory"
    return os.fspath(source)


def _read_jpeg(source: ImageLike) -> tuple[bytes | None, jpeg.Header | None]:
    """All bytes of a JPEG file and its header; None for any other source."""
    if isinstance(source, Image.Image):
        return None, None
    content = source if isinstance(source, bytes) else _read_jpeg_file(source)
    if content is None or not jpeg.is_jpeg(content):
        return None, None
    header = jpeg.read_header(content)
    if (header is None or header.multiple_scans) and jpeg.too_many_scans(content):
        raise InputError(f"{_name(source)}: a JPEG must have at most {jpeg.MAX_SCANS} scans; save it again")
    return content, header


def _read_jpeg_file(path: str | os.PathLike[str]) -> bytes | None:
    """The bytes of a JPEG file; None for other files. A file object would take as long as the reading."""
    descriptor = os.open(path, _READ)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError
        if not stat.S_ISREG(status.st_mode):  # it might never end
            raise InputError(f"{_name(path)}: is a pipe or a device, not an image")
        large = status.st_size > MAX_JPEG_BYTES
        # Of other names, and of files that are too large, only the first bytes are read; every call costs.
        first = status.st_size if os.fspath(path).endswith(_JPEG_NAMES) and not large else 3
        content = os.read(descriptor, first)
        if not jpeg.is_jpeg(content):
            return None
        if large:
            raise InputError(f"{_name(path)}: a JPEG must have at most {MAX_JPEG_BYTES:,} bytes; shrink it")
        while len(content) < status.st_size and (more := os.read(descriptor, status.st_size)):
            content += more
        return content
    finally:
        os.close(descriptor)


def _open_pillow(source: ImageLike, content: bytes | None) -> Image.Image:
    """An open Pillow image whose pixels are not decoded yet; `content` are the bytes of a JPEG."""
    if isinstance(source, Image.Image):
        return source.copy()  # closing it does not affect the original
    data = source if content is None else content
    try:
        return Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=FORMATS)
    except UnidentifiedImageError:
        head = _first_bytes(source, 12)
        if head[4:8] == b"ftyp" and head[8:] in _HEIF_BRANDS:
            return _open_heif(source)
        raise


def _open_heif(source: str | os.PathLike[str] | bytes) -> Image.Image:
    """A HEIC image, the format of many phones; its decoder is an extra."""
    try:
        from pillow_heif import HeifImageFile
    except ImportError:
        raise InputError(f"{_name(source)}: is a HEIC image; to read it: {install_command('heic')}") from None
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    image: Image.Image = HeifImageFile(file)  # type: ignore[no-untyped-call]
    return image


def _first_bytes(source: str | os.PathLike[str] | bytes, count: int) -> bytes:
    """The first bytes of a file."""
    if isinstance(source, bytes):
        return source[:count]
    with Path(source).open("rb") as file:
        return file.read(count)


def describe_non_image(source: ImageLike) -> str:
    """What a file is that is not an image, judged by its first bytes: "is a text file, not an image"."""
    if isinstance(source, Image.Image):
        return "is not an image"
    try:
        head = _first_bytes(source, 512)
    except OSError as error:  # it was readable a moment ago
        return f"can no longer be read ({error.strerror})"
    if not head:
        return "is empty, not an image"
    if b"\0" not in head and all(byte >= 32 or byte in b"\t\n\r\f" for byte in head):
        return "is a text file, not an image"
    return f"is not an image of a known kind ({', '.join(FORMATS)})"


def _orientation(content: bytes) -> int:
    """EXIF's number for how the camera was held; 1 (upright) where the block cannot be read."""
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # only the metadata is damaged
        return 1


def _rotate_upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF says; an EXIF block that cannot be read turns nothing."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # only the metadata is damaged
        return image.copy()


def _to_rgb(image: Image.Image, name: str, depth: int) -> Image.Image:
    """8-bit RGB from any mode; `depth`: bits of a channel, 0 if only the mode is known."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):
        depth = 16 if image.mode.startswith("I;16") else depth
        return Image.fromarray(_to_8_bit(np.asarray(image), name, depth)).convert("RGB")
    if image.mode == "F":
        raise InputError(
            f"{name}: its pixels are floating-point numbers; save it with 8 or 16 bits a channel"
        )
    if image.mode in ("La", "RGBa"):  # premultiplied alpha
        image = image.convert("LA" if image.mode == "La" else "RGBA")
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _to_8_bit(values: np.ndarray, name: str, depth: int) -> Pixels:
    """Gray of 16 bits, rounded to 8: 65535 is 255. In 32 bits, numbers up to 255 are 8 bits already."""
    if values.min() < 0 or values.max() > 65535:
        raise InputError(f"{name}: its pixels are 32-bit numbers; save it with 8 or 16 bits a channel")
    if depth != 16 and values.max() <= 255:
        return values.astype(np.uint8)
    return ((values.astype(np.int64) + 128) // 257).astype(np.uint8)
