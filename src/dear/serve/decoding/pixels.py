"""From the bytes of an image file to pixels, and what that costs."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

from PIL import Image

from dear.errors import InputError
from dear.images import jpeg
from dear.images.headers import read_header
from dear.images.open import FORMATS, describe_non_image
from dear.images.views import Size, view_pixels
from dear.serve.errors import Refused
from dear.serve.settings import Limits

_SIGNATURES = frozenset(
    (b"\x89PNG", b"RIFF", b"GIF8", b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+")
)
_SHORT_SIGNATURES = frozenset((b"\xff\xd8", b"BM", b"Pf", b"Py", *(b"P%d" % number for number in range(8))))
_SMALL = 2_000_000  # pixels; such a JPEG file of one scan takes a moment


@dataclass(frozen=True)
class Cost:
    """What a file costs to decode, according to its header."""

    pixels: int  #: to decode; scans beyond the usual number count again
    known: bool = True  #: whether the header could be read
    quick: bool = False  #: decoding surely takes a moment: a small JPEG file of one scan
    refusal: Refused | None = None  #: why the file is not decoded at all


@dataclass(frozen=True)
class Decoding:
    """How a file becomes pixels."""

    size: Size  #: side S of the square, or the whole rule
    limits: Limits = field(default_factory=Limits)  #: of one image

    def cost(self, content: bytes) -> Cost:
        """What a file costs to decode. Headers may be long: not called on the event loop.

        A file without a signature of an image is refused, and a JPEG file without a frame. Any other file
        whose header cannot be read may have as many pixels as are allowed.
        """
        most, plain = self.limits.pixels, jpeg.read_header(content) if jpeg.is_jpeg(content) else None
        if plain is not None and plain.plain and plain.width * plain.height <= min(_SMALL, most):
            return Cost(plain.width * plain.height, quick=True)
        header = read_header(content)
        if header is None:
            if not has_signature(content):
                return Cost(0, refusal=Refused(400, describe_non_image(content)))
            if jpeg.is_jpeg(content):
                reason = f"has no image within its first {jpeg.MAX_SEGMENTS:,} segments; save it anew"
                return Cost(0, refusal=Refused(400, reason))
            return Cost(most, known=False)
        size = f"{header.width} x {header.height} pixels"
        if header.pixels > most:
            return Cost(0, refusal=Refused(413, f"an image may have at most {most:,} pixels, got {size}"))
        if header.cost > most:
            reason = f"{header.scans} scans of {size} take too long to decode; save it as an ordinary JPEG"
            return Cost(0, refusal=Refused(413, reason))
        return Cost(header.cost)

    def pixels(self, content: bytes, most_pixels: int) -> bytes:
        """The bytes of uint8 [3, S, S]."""
        try:
            _check_size(content, most_pixels)
            view = view_pixels(content, self.size)  # [S, S, 3]
            pixels: bytes = view.transpose(2, 0, 1).tobytes()
            return pixels
        except InputError as error:
            if isinstance(error.__cause__, MemoryError):
                raise Refused(413, "takes too much memory to decode; make it smaller") from None
            raise Refused(400, _reason(error)) from None
        except (MemoryError, RuntimeError):  # PyTorch's kernels raise the latter
            raise Refused(413, "takes too much memory to decode; make it smaller") from None


def has_signature(content: bytes) -> bool:
    """Whether a file begins as an image of one of the accepted formats.

    >>> has_signature(b"GIF89a"), has_signature(b"hello there")
    (True, False)
    """
    return content[:4] in _SIGNATURES or content[:2] in _SHORT_SIGNATURES or content[4:8] == b"ftyp"


def _check_size(content: bytes, most_pixels: int) -> None:
    """Refuse a file that is larger than its header states."""
    header = jpeg.read_header(content)
    if header is not None:
        width, height = header.width, header.height
    else:
        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                width, height = image.size
        except Exception:  # the library's reader has the better sentence
            return
    if width * height > most_pixels:
        raise Refused(413, f"{width} x {height} pixels are more than its header states")


def _reason(error: InputError) -> str:
    """The sentence without the library's own name for bytes in memory."""
    return str(error).partition(": ")[2] or str(error)
