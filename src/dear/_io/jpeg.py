"""JPEG files by libjpeg-turbo, straight into an array; anything unusual is left to Pillow."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from dear._io.resample import Pixels

try:
    import simplejpeg
except ImportError:  # there is no wheel for this machine: Pillow decodes everything
    simplejpeg = None

MAX_SCANS = 100  # a progressive photograph has about ten; a decoder goes over the whole image for each
_START, _SCAN, _END, _NOTES = b"\xff\xd8", b"\xff\xda", 0xD9, 0xE1
_FRAMES, _PROGRESSIVE = (0xC0, 0xC1, 0xC2), 0xC2
_SCRATCH = 1 << 24
_own = threading.local()
_MARKER = re.compile(
    rb"\xff([^\x00\xd0-\xd7\xff])"
)  # in compressed data: neither a stuffed byte nor a restart


def is_jpeg(head: bytes) -> bool:
    """Whether a file that starts so is a JPEG."""
    return head[:3] == _START + b"\xff"


@dataclass(frozen=True)
class Header:
    """What a JPEG says of itself before its pixels."""

    width: int
    height: int
    colors: int
    depth: int  #: bits of a color
    notes: bool  #: it holds EXIF or XMP
    scans: bool  #: it has more than one scan


def read_header(content: bytes) -> Header | None:
    """The header; None where it is not that of an ordinary JPEG."""
    place, frame, notes = 2, b"", False
    while content[place : place + 1] == b"\xff":
        marker, length = content[place + 1], int.from_bytes(content[place + 2 : place + 4], "big")
        if marker in _FRAMES:
            frame = content[place : place + 10]
        if marker == _SCAN[1]:
            if len(frame) < 10 or place + 5 > len(content):
                return None
            height, width = int.from_bytes(frame[5:7], "big"), int.from_bytes(frame[7:9], "big")
            several = frame[1] == _PROGRESSIVE or content[place + 4] != frame[9]
            return Header(width, height, frame[9], frame[4], notes, several)
        notes = notes or marker == _NOTES
        place += 2 + length
    return None


def decode(content: bytes, width: int, height: int, scratch: bool = False) -> Pixels | None:
    """RGB pixels [height, width, 3]; None where the file is damaged or not what its header says.

    With `scratch` they stand in a buffer of this thread, which the next call writes over.
    """
    if simplejpeg is None:
        return None
    count = height * width * 3
    if scratch and count <= _SCRATCH:
        if len(getattr(_own, "buffer", ())) < count:
            _own.buffer = np.empty(count, np.uint8)
        pixels: Pixels = _own.buffer[:count].reshape(height, width, 3)
    else:
        pixels = np.empty((height, width, 3), np.uint8)
    try:
        found: Any = simplejpeg.decode_jpeg(content, "RGB", buffer=pixels)
    except ValueError:
        return None
    return pixels if found.shape == pixels.shape else None


def turned(pixels: Pixels, orientation: int) -> Pixels:
    """The image upright, by EXIF's number for how the camera was held."""
    match orientation:
        case 2:
            pixels = pixels[:, ::-1]
        case 3:
            pixels = pixels[::-1, ::-1]
        case 4:
            pixels = pixels[::-1]
        case 5:
            pixels = pixels.transpose(1, 0, 2)
        case 6:
            pixels = pixels[::-1].transpose(1, 0, 2)
        case 7:
            pixels = pixels[::-1, ::-1].transpose(1, 0, 2)
        case 8:
            pixels = pixels[:, ::-1].transpose(1, 0, 2)
    return np.ascontiguousarray(pixels)


def too_many_scans(content: bytes) -> bool:
    """Whether a JPEG asks a decoder to go over its pixels more than `MAX_SCANS` times."""
    if content.count(_SCAN) <= MAX_SCANS:
        return False
    # These bytes may also stand in what is no image data: previews, color profiles, a film behind the photo.
    place, scans = 2, 0
    while scans <= MAX_SCANS:
        found = _MARKER.search(content, place)
        if found is None or found[1][0] == _END:
            return False
        place = found.end()
        scans += found[1] == _SCAN[1:]
        if found[1][0] != 0x01:  # all markers but this one have a length
            place += int.from_bytes(content[place : place + 2], "big")
    return True
