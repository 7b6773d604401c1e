"""Headers of hostile files are read in bounded time and never raise."""

from __future__ import annotations

import io
import struct
import time

import pytest
from PIL import Image

from dear.images import headers, jpeg


def photo() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(file, "JPEG")
    return file.getvalue()


def test_every_beginning_of_a_jpeg_has_a_header_or_none() -> None:
    content = photo()
    assert jpeg.read_header(content) is not None
    for length in range(len(content)):
        for read in (jpeg.read_header, headers.read_header):
            header = read(content[:length])
            assert header is None or (header.width, header.height) == (40, 30)
            read(content[:length] + b"\xff")


@pytest.mark.parametrize("tail", [b"", photo()[2:]])
def test_a_jpeg_of_empty_segments_is_given_up_at_once(tail: bytes) -> None:
    content = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 2_000_000 + tail
    start = time.process_time()
    assert jpeg.read_header(content) is None
    assert headers.read_header(content) is None
    assert time.process_time() - start < 0.2


def test_the_largest_size_of_an_avif_counts_up_to_a_bound() -> None:
    def box(width: int, height: int) -> bytes:
        return b"ispe" + struct.pack(">III", 0, width, height)

    start = b"\0\0\0\0ftypavif"
    assert headers.read_header(start + box(3, 4) + box(30, 40)) == headers.Header(30, 40)
    assert headers.read_header(start + box(3, 4) * 1000 + box(30, 40)) == headers.Header(3, 4)
