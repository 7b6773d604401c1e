"""A multipart body that is held in memory, read in one go and within bounds (RFC 7578)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from python_multipart.multipart import parse_options_header

from dear.serve.errors import Refused

_MOST_HEADER_BYTES = 8192  # of one part
_MOST_FIELD_BYTES = 512 * 1024  # of a part that is no file
_MOST_BOUNDARY = 200
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): *([^\r]*)")
# What clients usually send; anything else is left to a parser of such values, which takes longer.
_USUAL_TYPE = re.compile(r'multipart/form-data; *boundary=([^\s"\\;=]+)')
_USUAL_DISPOSITION = re.compile(rb'form-data; name="([^"\\;]*)"(?:; filename="([^"\\;]*)")?')


class Part(NamedTuple):
    """A field of a form, or a file where it has a file's name."""

    name: str
    filename: str | None
    content: bytes


def read_parts(body: bytes, content_type: str, most: int) -> list[Part]:
    """The parts of a body, at most so many."""
    found: list[Part] = []
    for part in _parts(body, _boundary(content_type)):
        if len(found) >= most:
            raise Refused(413, f"the multipart body has more than {most} parts")
        if part.filename is None and len(part.content) > _MOST_FIELD_BYTES:
            raise Refused(413, f"the field {part.name[:80]!r} has more than {_MOST_FIELD_BYTES:,} bytes")
        found.append(part)
    return found


def _boundary(content_type: str) -> bytes:
    usual = _USUAL_TYPE.fullmatch(content_type)
    if usual:
        found = usual[1].encode("latin-1")
    else:
        found = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 0 < len(found) <= _MOST_BOUNDARY:
        raise _unreadable("its boundary is missing or too long")
    return found


def _parts(body: bytes, boundary: bytes) -> Iterator[Part]:
    """The parts between delimiters, which are lines of `--boundary`; the last one ends in `--`."""
    delimiter = b"\r\n--" + boundary
    place = body.find(b"-") if body[:1] in (b"\r", b"\n") else 0
    if place < 0 or not body.startswith(delimiter[2:], place):
        raise _unreadable("it does not begin with its boundary")
    place += len(delimiter) - 2
    while not body.startswith(b"--", place):
        if not body.startswith(b"\r\n", place):
            raise _unreadable("a boundary is not followed by a line's end")
        end = body.find(b"\r\n\r\n", place, place + _MOST_HEADER_BYTES + 4)
        if end < 0:
            if len(body) - place > _MOST_HEADER_BYTES:
                raise Refused(400, f"a part's header has more than {_MOST_HEADER_BYTES:,} bytes")
            raise _unreadable("it ends too early")
        name, filename = _names(body[place + 2 : end])
        begin = end + 4
        end = body.find(delimiter, begin)
        while end >= 0 and body[(place := end + len(delimiter)) : place + 2] not in (b"\r\n", b"--"):
            end = body.find(delimiter, place)  # the boundary goes on: content that looks like it
        if end < 0:
            raise _unreadable("it ends too early")
        yield Part(name, filename, body[begin:end])


def _names(header: bytes) -> tuple[str, str | None]:
    """Names of the field and of the file in a part's header lines."""
    name, filename = b"", None
    for line in header.split(b"\r\n") if header else ():
        found = _HEADER.fullmatch(line)
        if found is None:
            raise _unreadable("a part's header is not one")
        if found[1].lower() == b"content-disposition":
            usual = _USUAL_DISPOSITION.fullmatch(found[2])
            if usual:
                name, filename = usual[1], usual[2]
            else:
                options = parse_options_header(found[2])[1]
                name, filename = options.get(b"name", b""), options.get(b"filename")
    return name.decode("utf-8", "replace"), None if filename is None else filename.decode("utf-8", "replace")


def _unreadable(reason: str) -> Refused:
    return Refused(400, f"the multipart body cannot be read: {reason}")
