"""JPEG files by libjpeg-turbo, straight into an array; Pillow decodes anything unusual."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from dear.images.resample import Pixels

try:
    import simplejpeg
except ImportError:  # there is no wheel for this machine: Pillow decodes everything
    simplejpeg = None

MAX_SEGMENTS = 1000  # before the image data; a camera writes about twenty
MAX_SCANS = 100  # a progressive photograph has about ten; a decoder goes over the whole image for each
_START, _SCAN, _END, _APP1, _ADOBE = b"\xff\xd8", b"\xff\xda", 0xD9, 0xE1, 0xEE
_FRAMES, _BASELINE, _PROGRESSIVE = (0xC0, 0xC1, 0xC2), 0xC0, 0xC2
# number and sampling of each color: gray, and YCbCr whose color has all, half or a quarter of the pixels
_PLAIN_COLORS = (b"\x01\x11", *(b"\x01%c\x02\x11\x03\x11" % luma for luma in (0x11, 0x21, 0x22)))
#: how an image becomes upright, by EXIF's number: axes to mirror (rows, columns), then whether to transpose
TURNS: dict[int, tuple[tuple[int, ...], bool]] = {
    2: ((1,), False), 3: ((0, 1), False), 4: ((0,), False),
    5: ((), True), 6: ((0,), True), 7: ((0, 1), True), 8: ((1,), True),
}  # fmt: skip
_SCRATCH = 1 << 24  # bytes of a buffer at most
_thread = threading.local()
# In compressed data: neither a stuffed byte nor a restart
_MARKER = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])")


def is_jpeg(head: bytes) -> bool:
    """Whether a file with this beginning is a JPEG."""
    return head[:3] == _START + b"\xff"


@dataclass(frozen=True)
class Header:
    """What a JPEG declares before its pixels."""

    width: int
    height: int
    colors: int
    depth: int  #: bits of a color
    has_metadata: bool  #: whether it contains EXIF or XMP
    multiple_scans: bool  #: whether it has more than one scan
    plain: bool  #: whether all decoders agree on it: baseline, one scan, YCbCr of the usual samplings or gray


def read_header(content: bytes) -> Header | None:
    """The header; None where it is not that of an ordinary JPEG."""
    offset, frame, has_metadata, adobe = 2, b"", False, False
    for _ in range(MAX_SEGMENTS):
        if content[offset : offset + 1] != b"\xff" or offset + 1 >= len(content):
            return None
        marker, length = content[offset + 1], int.from_bytes(content[offset + 2 : offset + 4], "big")
        if marker in _FRAMES:
            frame = content[offset : offset + 2 + length]
        if marker == _SCAN[1]:
            if len(frame) < 10 or offset + 5 > len(content):
                return None
            height, width = int.from_bytes(frame[5:7], "big"), int.from_bytes(frame[7:9], "big")
            multiple_scans = frame[1] == _PROGRESSIVE or content[offset + 4] != frame[9]
            colors = b"".join(frame[at : at + 2] for at in range(10, len(frame), 3))
            plain = frame[1] == _BASELINE and not multiple_scans and not adobe and colors in _PLAIN_COLORS
            return Header(
                width, height, frame[9], frame[4], has_metadata, multiple_scans, plain and frame[4] == 8
            )
        has_metadata, adobe = has_metadata or marker == _APP1, adobe or marker == _ADOBE
        offset += 2 + length
    return None


def decode(content: bytes, width: int, height: int, scratch: bool = False) -> Pixels | None:
    """RGB pixels [height, width, 3]; None where the file is damaged or does not match its header.

    With `scratch` they are in a buffer of this thread, which the next call overwrites.
    """
    if simplejpeg is None:
        return None
    count = height * width * 3
    if scratch and count <= _SCRATCH:
        if len(getattr(_thread, "buffer", ())) < count:
            _thread.buffer = np.empty(count, np.uint8)
        pixels: Pixels = _thread.buffer[:count].reshape(height, width, 3)
    else:
        pixels = np.empty((height, width, 3), np.uint8)
    try:
        decoded: Any = simplejpeg.decode_jpeg(content, "RGB", buffer=pixels)
    except ValueError:
        return None
    return pixels if decoded.shape == pixels.shape else None


def is_complete(content: bytes) -> bool:
    """Whether the file ends with the marker that ends an image."""
    return content.endswith(bytes((0xFF, _END)))


def rotate_upright(pixels: Pixels, orientation: int) -> Pixels:
    """The image upright, by EXIF's number for how the camera was held."""
    mirrored, transposed = TURNS.get(orientation, ((), False))
    upright = np.flip(pixels, mirrored)
    return np.ascontiguousarray(upright.transpose(1, 0, 2) if transposed else upright)


def too_many_scans(content: bytes) -> bool:
    """Whether a JPEG requires more than `MAX_SCANS` passes over its pixels."""
    if content.count(_SCAN) <= MAX_SCANS:
        return False
    # These bytes also occur outside of image data: previews, color profiles, a film appended to the photo.
    offset, scans = 2, 0
    while scans <= MAX_SCANS:
        marker = _MARKER.search(content, offset)
        if marker is None or marker[1][0] == _END:
            return False
        offset = marker.end()
        scans += marker[1] == _SCAN[1:]
        if marker[1][0] != 0x01:  # all markers but this one have a length
            offset += int.from_bytes(content[offset : offset + 2], "big")
    return True
