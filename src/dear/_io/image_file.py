"""From image files to the square of pixels that CLIP sees.

`find_images` finds image files; `open_image` turns any ordinary image into upright 8-bit RGB; `square` makes
CLIP's view of it (short side to `size`, bicubic, center crop). `threaded` and `in_batches` walk through many
images. An exported model runs with these where PyTorch is not installed; only functions of
tensors need it.

Two choices where CLIP's own code is silent: transparent images are laid on white (dropping the alpha
channel, as `convert("RGB")` does, shows whatever colors were left under it), and 16-bit gray is scaled to
8 bit (`convert("RGB")` clips it to white).
"""

from __future__ import annotations

import glob
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from dear.errors import InputError, OutOfMemory, ran_out

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_log = logging.getLogger("dear")
Item = TypeVar("Item")
Result = TypeVar("Result")
Source = str | os.PathLike[str] | bytes | Image.Image

# 100 megapixels: 300 MB as RGB. Pillow refuses by itself only what is twice its own limit.
MAX_PIXELS = 100_000_000
MAX_SIDE = 65_535  # JPEG's own limit; some decoders take long for a line of millions of pixels
# Only these decoders are tried; others start outside programs (EPS) or read formats that are no photographs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
# What names of image files end in; HEIC needs the extra package pillow-heif.
SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .png .webp .gif .bmp .tif .tiff .ppm .pgm .avif .heic .heif".split()  # noqa: SIM905
)
# Folders that operating systems leave behind.
IGNORED = frozenset(("__macosx", "@eadir", "$recycle.bin", "system volume information"))
_HEIF_BRANDS = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"))
# Of an image longer than this (times its short side) only the middle is kept: resized, it would fill memory.
MAX_ASPECT = 16


def open_image(source: Source) -> Image.Image:
    """The image as upright 8-bit RGB, of an animation the first frame.

    EXIF rotation is applied; palette, gray, CMYK and 16-bit images are converted; transparent ones are laid
    on white.

    Args:
        source: a path, the bytes of a file, or an open Pillow image (left unchanged).

    Raises:
        InputError: the file is missing, empty, cut, no image, or larger than `MAX_PIXELS`; it is named.

    >>> open_image(Image.new("L", (4, 3), 7)).getpixel((0, 0))
    (7, 7, 7)
    """
    name = _name(source)
    try:
        with _opened(source) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise InputError(
                    f"{name}: {width} x {height} pixels are more than {MAX_PIXELS:,}; make it smaller"
                )
            if max(width, height) > MAX_SIDE:
                raise InputError(
                    f"{name}: {width} x {height} pixels: no side may be longer than {MAX_SIDE:,}"
                )
            image.load()
            return _to_rgb(_upright(image), name)
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{name}: no such image") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InputError(f"{name}: it has more than {MAX_PIXELS:,} pixels; make it smaller") from None
    except UnidentifiedImageError:
        raise InputError(f"{name}: {_what_instead(source)}") from None
    except IsADirectoryError:
        raise InputError(f"{name}: is a folder, not an image") from None
    except PermissionError:
        raise InputError(f"{name}: may not be read; change its permissions") from None
    except Exception as error:  # a decoder that meets hostile or cut data may raise anything
        raise InputError(
            f"{name}: the image is damaged or cut off ({error}); replace or remove it"
        ) from error


def _name(source: Source) -> str:
    """How messages call a source."""
    if isinstance(source, bytes):
        return f"image of {len(source):,} bytes"
    if isinstance(source, Image.Image):
        return str(getattr(source, "filename", "")) or "image in memory"
    return os.fspath(source)


def _opened(source: Source) -> Image.Image:
    """An open Pillow image whose pixels are not decoded yet (closing it leaves a given image alone)."""
    if isinstance(source, Image.Image):
        return source.copy()
    if (
        not isinstance(source, bytes)
        and not Path(source).is_file()
        and Path(source).exists()
        and not Path(source).is_dir()
    ):
        raise InputError(f"{os.fspath(source)}: is a pipe or a device, not an image")  # it might never end
    try:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
    except UnidentifiedImageError:
        if _head(source, 12)[4:8] == b"ftyp" and _head(source, 12)[8:] in _HEIF_BRANDS:
            return _open_heif(source)
        raise


def _open_heif(source: str | os.PathLike[str] | bytes) -> Image.Image:
    """A HEIC image, as telephones take them; its decoder is an extra."""
    try:
        from pillow_heif import HeifImageFile
    except ImportError:
        raise InputError(
            f"{_name(source)}: is a HEIC image; install pillow-heif (pip install 'dear-vlm[heic]') to read it"
        ) from None
    opened = io.BytesIO(source) if isinstance(source, bytes) else source
    image: Image.Image = HeifImageFile(opened)  # type: ignore[no-untyped-call]
    return image


def _head(source: str | os.PathLike[str] | bytes, count: int) -> bytes:
    """The first bytes of a file."""
    if isinstance(source, bytes):
        return source[:count]
    with Path(source).open("rb") as file:
        return file.read(count)


def is_image_name(name: str) -> bool:
    """Whether a file's name is not hidden and ends like an image's.

    >>> is_image_name("a.JPG"), is_image_name("._a.jpg"), is_image_name("notes.txt")
    (True, False, False)
    """
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def _what_instead(source: Source) -> str:
    """What an unreadable file is, as far as its first bytes tell."""
    if isinstance(source, Image.Image):
        return "is not an image"
    try:
        head = _head(source, 512)
    except OSError as error:  # it was there a moment ago
        return f"can no longer be read ({error.strerror})"
    if not head:
        return "is empty, not an image"
    if b"\0" not in head and all(byte >= 32 or byte in b"\t\n\r\f" for byte in head):
        return "is a text file, not an image"
    return f"is not an image of a known kind ({', '.join(FORMATS)})"


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF says; an EXIF block that cannot be read turns nothing."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # the pixels are whole, only the note beside them is not
        return image.copy()


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    """8-bit RGB from any mode."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):
        return Image.fromarray(_sixteen_to_eight(np.asarray(image), name)).convert("RGB")
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


def _sixteen_to_eight(values: np.ndarray, name: str) -> np.ndarray:
    """16-bit gray, whatever integers hold it, rounded to 8 bit: 65535 is 255."""
    if values.min() < 0 or values.max() > 65535:
        raise InputError(f"{name}: its pixels are 32-bit numbers; save it with 8 or 16 bits a channel")
    return ((values.astype(np.int64) + 128) // 257).astype(np.uint8)


def _middle(image: Image.Image) -> Image.Image:
    """The image, cut to its middle where it is absurdly long."""
    width, height = image.size
    limit = MAX_ASPECT * min(width, height)
    if max(width, height) <= limit:
        return image
    left, top = max(0, (width - limit) // 2), max(0, (height - limit) // 2)
    return image.crop((left, top, left + min(width, limit), top + min(height, limit)))


def resize_short(
    image: Image.Image, size: int, filtered: Image.Resampling = Image.Resampling.BICUBIC
) -> Image.Image:
    """Short side to `size`, bicubic, aspect kept; the long side is rounded down, as in CLIP's transform.

    >>> resize_short(Image.new("RGB", (100, 51)), 10).size
    (19, 10)
    """
    image = _middle(image)
    width, height = image.size
    short, long = min(width, height), max(width, height)
    if short == size:
        return image
    long = int(size * long / short)
    return image.resize((size, long) if width <= height else (long, size), filtered)


@dataclass(frozen=True)
class View:
    """How an image becomes a square: its side in pixels, and how it is resized.

    By default the short side is resized and the center kept; with `squash` both sides are resized.
    """

    size: int
    squash: bool = False
    bilinear: bool = False


Size = int | View  #: the side of a square cut from the middle, or the whole rule


def side_of(size: Size) -> int:
    """The side of the square in pixels."""
    return size if isinstance(size, int) else size.size


def square(image: Image.Image, size: Size) -> Image.Image:
    """A model's view of an image: by default the short side to `size` bicubic, then the center.

    The corner of the crop is rounded half to even, as in CLIP's transform. Other modes than RGB are converted
    as in `open_image`.

    >>> wide = Image.new("RGB", (30, 20))
    >>> square(wide, 8).size, square(wide, View(8, squash=True)).size
    ((8, 8), (8, 8))
    """
    view = size if isinstance(size, View) else View(size)
    image, size = image if image.mode == "RGB" else open_image(image), view.size
    filtered = Image.Resampling.BILINEAR if view.bilinear else Image.Resampling.BICUBIC
    if view.squash:
        return image if image.size == (size, size) else image.resize((size, size), filtered)
    image = resize_short(image, size, filtered)
    width, height = image.size
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def to_tensor(image: Image.Image) -> Tensor:
    """An RGB image as uint8 [3, height, width]."""
    import torch  # not above: see the head of this file

    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def resize_crop(image: Image.Image, size: Size) -> Tensor:
    """A model's view of an image: by default the short side to `size` bicubic, then the center.

    Args:
        image: a Pillow image; other modes than RGB are converted as in `open_image`.
        size: side of the result in pixels, or a `View`.

    Returns:
        uint8 [3, size, size].

    >>> resize_crop(Image.new("RGB", (30, 20), (1, 2, 3)), 8)[:, 0, 0].tolist()
    [1, 2, 3]
    """
    return to_tensor(square(image, size))


def normalize(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Subtract the mean and divide by the standard deviation of each color.

    Args:
        pixels: [..., 3, h, w], uint8, or floating point in [0, 1].
        mean: of each color, for values in [0, 1].
        std: of each color.

    Returns:
        float [..., 3, h, w] on the same device.
    """
    values = pixels if pixels.is_floating_point() else pixels.float() / 255
    center = _colors(tuple(mean), values.dtype, values.device)
    spread = _colors(tuple(std), values.dtype, values.device)
    return (values - center) / spread


@lru_cache(maxsize=32)
def _colors(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One value per color as [3, 1, 1]; cached, because copying it to a GPU makes the host wait."""
    import torch

    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(3, 1, 1)


def is_own_name(name: str) -> bool:
    """Whether a file or folder is the user's: not hidden, and not made by an operating system."""
    return not name.startswith(".") and name.lower() not in IGNORED


def image_paths(folder: Path) -> Iterator[str]:
    """Paths of all images below a folder, relative to it, with `/` between the parts."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if is_own_name(name)]
        inner = Path(place).relative_to(folder)
        for file in files:
            if is_image_name(file):
                yield (inner / file).as_posix()


def find_images(names: Iterable[str]) -> list[str]:
    """Image files of a list that may hold files, folders (searched at every depth) and patterns (`*.jpg`).

    Files are kept as they are named, whether they exist or not: reading them tells.

    Raises:
        InputError: a folder without images, or a pattern that nothing fits.
    """
    found: list[str] = []
    for name in names:
        if os.path.isdir(name):
            inside = sorted(image_paths(Path(name)))
            if not inside:
                raise InputError(f"{name}: there is no image in this folder")
            found += [str(Path(name) / path) for path in inside]
        elif glob.has_magic(name) and not os.path.exists(name):
            fitting = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
            if not fitting:
                raise InputError(f"{name}: no file fits this pattern")
            found += fitting
        else:
            found.append(name)
    return found


def threaded(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`function` of every item, computed by several threads: image decoders release Python's lock."""
    workers = min(len(items), os.cpu_count() or 1, 16)
    if workers < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, items))


def in_batches(work: Callable[[range], Result], count: int, batch: int) -> Iterator[tuple[range, Result]]:
    """`work` of the rows 0 to `count` - 1, a batch at a time; when memory runs out, batches are halved.

    For work whose answer for a row does not depend on the other rows. Halving is told by a warning of the
    logger "dear", which stands on standard error unless the program says otherwise.

    Yields:
        the rows of a batch and what `work` made of them.

    Raises:
        OutOfMemory: not even one row fits.

    >>> [result for _, result in in_batches(lambda rows: list(rows), 5, 2)]
    [[0, 1], [2, 3], [4]]
    """
    start = 0
    while start < count:
        rows = range(start, min(start + batch, count))
        try:
            result = work(rows)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            if len(rows) == 1:
                raise OutOfMemory(
                    "not even one image at a time fits into memory; use a smaller backbone or another device",
                    hint="device",
                ) from error
            batch = len(rows) // 2
            logging.getLogger("dear").warning(
                "dear: out of memory with %d images at once; going on with %d", len(rows), batch
            )
        else:
            yield rows, result
            start = rows.stop
            continue
        import torch

        if torch.cuda.is_available():  # only now: the error held on to the tensors of the failed batch
            torch.cuda.empty_cache()
