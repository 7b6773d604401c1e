"""Files and requests that attack a service, made on the spot."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path

from PIL import Image


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def many_scans(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated: every scan is a pass over all pixels."""
    content = encoded(Image.new("RGB", (side, side), (90, 120, 30)), "JPEG", progressive=True)
    last, end = content.rindex(b"\xff\xda"), content.rindex(b"\xff\xd9")
    return content[:end] + content[last:end] * (scans - content.count(b"\xff\xda")) + content[end:]


def empty_webp(side: int) -> bytes:
    """A few bytes that stand for side x side pixels with transparency."""
    return encoded(Image.new("RGBA", (side, side)), "WEBP", lossless=True, quality=0, method=0)


def packed(run: Path, **changed: bytes) -> bytes:
    """The zip archive of a run folder, with some files changed."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in run.iterdir():
            if path.is_file() and not path.name.startswith("."):
                name = path.name.replace(".", "_")
                archive.writestr(path.name, changed.get(name, path.read_bytes()))
    return file.getvalue()


def broken_zips(run: Path) -> dict[str, bytes]:
    """Archives of a run that are damaged in ways that Python's reader meets late."""
    good = bytearray(packed(run))
    deflate = bytearray(good)
    start = 30 + struct.unpack("<H", deflate[26:28])[0] + struct.unpack("<H", deflate[28:30])[0]
    deflate[start : start + 8] = b"\xff" * 8
    offset = bytearray(good)
    end = offset.rindex(b"PK\x05\x06")
    struct.pack_into("<I", offset, end + 16, 0xFFFFFF0)
    name = bytearray(good)
    directory = name.index(b"PK\x01\x02")
    flags = struct.unpack_from("<H", name, directory + 8)[0]
    struct.pack_into("<H", name, directory + 8, flags | 0x800)
    name[directory + 46] = 0xFF
    checksum = bytearray(good)
    struct.pack_into("<I", checksum, checksum.index(b"PK\x01\x02") + 16, zlib.crc32(b"other"))
    return {name_: bytes(one) for name_, one in
            {"deflate": deflate, "offset": offset, "name": name, "checksum": checksum}.items()}  # fmt: skip
