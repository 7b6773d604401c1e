"""A multipart body that is held in memory, read in one go and within bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from dear.serve.errors import Refused

_MOST_HEADER_BYTES = 8192  # of one part
_MOST_FIELD_BYTES = 512 * 1024  # of a part that is no file
_MOST_BOUNDARY = 200


@dataclass
class Part:
    """A field of a form, or a file where it has a file's name."""

    name: str = ""
    filename: str | None = None
    content: bytearray = field(default_factory=bytearray)


def read_parts(body: bytes, content_type: str, most: int) -> list[Part]:
    """The parts of a body, at most so many."""
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 0 < len(boundary) <= _MOST_BOUNDARY:
        raise Refused(400, "the multipart body cannot be read: its boundary is missing or too long")
    reader = _Reader(most)
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise Refused(400, f"the multipart body cannot be read: {error}") from None
    if not reader.ended:
        raise Refused(400, "the multipart body cannot be read: it ends too early")
    return reader.parts


class _Reader:
    """What the parser calls."""

    def __init__(self, most: int) -> None:
        self.parts: list[Part] = []
        self.ended = False
        self._most, self._header, self._length = most, [bytearray(), bytearray()], 0

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._part_of_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._part_of_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) >= self._most:
            raise Refused(413, f"the multipart body has more than {self._most} parts")
        self.parts.append(Part())
        self._header, self._length = [bytearray(), bytearray()], 0

    def _part_of_header(self, which: int, data: bytes) -> None:
        self._length += len(data)
        if self._length > _MOST_HEADER_BYTES:
            raise Refused(400, f"a part's header has more than {_MOST_HEADER_BYTES:,} bytes")
        self._header[which] += data

    def _end_header(self) -> None:
        name, value = (bytes(one) for one in self._header)
        self._header = [bytearray(), bytearray()]
        if name.lower() == b"content-disposition":
            _, options = parse_options_header(value)
            part = self.parts[-1]
            part.name = options.get(b"name", b"").decode("utf-8", "replace")
            if b"filename" in options:
                part.filename = options[b"filename"].decode("utf-8", "replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        part.content += memoryview(data)[start:end]
        if part.filename is None and len(part.content) > _MOST_FIELD_BYTES:
            raise Refused(413, f"the field {part.name[:80]!r} has more than {_MOST_FIELD_BYTES:,} bytes")

    def _end(self) -> None:
        self.ended = True
