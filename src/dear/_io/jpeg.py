"""JPEG files by libjpeg-turbo, straight into an array; anything unusual is left to Pillow."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from dear._io.resample import Pixels

try:
    import simplejpeg
except ImportError:  # there is no wheel for this machine: Pillow decodes everything
    simplejpeg = None

MAX_SCANS = 100  # a progressive photograph has about ten; a decoder goes over the whole image for each
_START, _SCAN, _END = b"\xff\xd8", b"\xff\xda", 0xD9
_MARKER = re.compile(
    rb"\xff([^\x00\xd0-\xd7\xff])"
)  # in compressed data: neither a stuffed byte nor a restart


def is_jpeg(head: bytes) -> bool:
    """Whether a file that starts so is a JPEG."""
    return head[:3] == _START + b"\xff"


def decode(content: bytes, width: int, height: int) -> Pixels | None:
    """RGB pixels [height, width, 3]; None where the file is damaged or not what its header says."""
    if simplejpeg is None:
        return None
    pixels: Pixels = np.empty((height, width, 3), np.uint8)
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
