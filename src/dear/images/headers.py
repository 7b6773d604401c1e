"""The cost of decoding an image, read from the bytes of its file without a decoder.

A few bytes can expand to many pixels (46 bytes of WebP to 49 million), and a progressive JPEG of many scans
is decoded once per scan. Budgets are reserved by these numbers before a decoder sees the file; a decoder that
finds more pixels than the header declares must refuse the file.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from itertools import islice

from dear.images import jpeg

#: scans of a JPEG file that cost no more than one; encoders write about ten
USUAL_SCANS = 12
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of a JPEG's frame header
_MAX_TAGS = 4096  # of a TIFF's first directory
_MAX_SIZES = 1000  # of an AVIF or HEIC file


@dataclass(frozen=True)
class Header:
    """Size of an image in pixels, and for JPEG the number of scans."""

    width: int
    height: int
    scans: int = 1

    @property
    def pixels(self) -> int:
        """Width times height."""
        return self.width * self.height

    @property
    def cost(self) -> int:
        """Pixels that are decoded, each as often as there are scans beyond the usual number."""
        return self.pixels * max(1, -(-self.scans // USUAL_SCANS))


def read_header(content: bytes) -> Header | None:
    """The header of an image file; None where it cannot be read.

    >>> read_header(b"GIF89a" + struct.pack("<HH", 640, 480))
    Header(width=640, height=480, scans=1)
    """
    try:
        if content[:2] == b"\xff\xd8":
            return _jpeg(content)
        if content[:8] == b"\x89PNG\r\n\x1a\n":
            return Header(*struct.unpack(">II", content[16:24]))
        if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
            return _webp(content)
        if content[:6] in (b"GIF87a", b"GIF89a"):
            return Header(*struct.unpack("<HH", content[6:10]))
        if content[:2] == b"BM":
            return _bmp(content)
        if content[:4] in (b"II*\0", b"MM\0*"):
            return _tiff(content)
        if content[4:8] == b"ftyp":
            return _isobmff(content)
        if content[:2] in (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"):
            size = re.match(rb"P\d(?:\s|#[^\n]*\n)+(\d{1,9})(?:\s|#[^\n]*\n)+(\d{1,9})\s", content[:4096])
            return size and Header(int(size[1]), int(size[2]))
    except (struct.error, IndexError, ValueError):
        pass
    return None


def count_scans(content: bytes) -> int:
    """Scans of a JPEG file: its start-of-scan markers (compressed data contains none by accident)."""
    return content.count(b"\xff\xda")


def _jpeg(content: bytes) -> Header | None:
    plain_header = jpeg.read_header(content)
    if plain_header is not None:
        return Header(
            plain_header.width,
            plain_header.height,
            count_scans(content) if plain_header.multiple_scans else 1,
        )
    offset = 2
    for _ in range(jpeg.MAX_SEGMENTS):
        offset = content.index(b"\xff", offset) if content[offset] != 0xFF else offset
        marker = content[offset + 1]
        if marker == 0xFF:  # padding
            offset += 1
        elif marker in _FRAMES:
            height, width = struct.unpack(">HH", content[offset + 5 : offset + 9])
            return Header(width, height, count_scans(content))
        elif marker == 0x01 or 0xD0 <= marker <= 0xD8:  # without a length
            offset += 2
        else:
            offset += 2 + struct.unpack(">H", content[offset + 2 : offset + 4])[0]
    return None


def _webp(content: bytes) -> Header | None:
    kind = content[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(content[at : at + 3], "little") + 1 for at in (24, 27))
        return Header(width, height)
    if kind == b"VP8L":
        bits = int.from_bytes(content[21:25], "little")
        return Header((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", content[26:30])
        return Header(width & 0x3FFF, height & 0x3FFF)
    return None


def _bmp(content: bytes) -> Header:
    if struct.unpack("<I", content[14:18])[0] == 12:
        return Header(*struct.unpack("<HH", content[18:22]))
    width, height = struct.unpack("<ii", content[18:26])
    return Header(abs(width), abs(height))


def _tiff(content: bytes) -> Header | None:
    order = "<" if content[:2] == b"II" else ">"
    (offset,) = struct.unpack(order + "I", content[4:8])
    (count,) = struct.unpack(order + "H", content[offset : offset + 2])
    sides: dict[int, int] = {}
    for at in range(offset + 2, offset + 2 + 12 * min(count, _MAX_TAGS), 12):
        tag, kind = struct.unpack(order + "HH", content[at : at + 4])
        if tag in (256, 257):
            form = {3: "H", 4: "I"}.get(kind)
            if form is None:
                return None
            (sides[tag],) = struct.unpack_from(order + form, content, at + 8)
    return Header(sides[256], sides[257]) if len(sides) == 2 else None


def _isobmff(content: bytes) -> Header | None:
    """AVIF and HEIC: the largest of the sizes that their boxes name."""
    matches = islice(re.finditer(b"ispe", content[: 1 << 20]), _MAX_SIZES)
    sizes = [struct.unpack_from(">II", content, match.start() + 8) for match in matches]
    return Header(*max(sizes, key=lambda size: size[0] * size[1])) if sizes else None
