"""Fields and files of a multipart form whose body is in memory.

Starlette reads forms. Its parser is a state machine in Python and took about a quarter of a profiled request
of one image, so forms as browsers, curl and Python clients write them are split at their boundaries first
(`split_form`). Everything else, and everything that is refused, goes to Starlette.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar, cast

from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from dear.serve.errors import Refused

T = TypeVar("T")
Part = tuple[str, str | None, str | bytes]  #: name of the field, name of the file, text or file
_MOST_FIELD_BYTES = 512 * 1024  # of a part that is no file
_MOST_PARAMETERS = 32  # of a header of a part
_MOST_HEADER = 512  # bytes of a part's headers that `split_form` reads
_CHARSET = re.compile(r";\s*charset=[^;]*", re.IGNORECASE)  # fields are UTF-8, whatever it names
_TYPE = re.compile(r"multipart/form-data; ?boundary=([A-Za-z0-9_-]{1,70})")
_QUOTED = rb'"([ !#-:<-\[\]-~]{%d,255})"'  # plain ASCII, without a quote, a semicolon or a backslash
_HEADERS = re.compile(
    rb"\r\nContent-Disposition: form-data; name=" + _QUOTED % 1 + rb"(?:; filename=" + _QUOTED % 0 + rb")?"
    rb"(?:\r\nContent-Type: [A-Za-z0-9.+/-]{1,80})?\r\n\r\n"
)


def parse_form(body: bytes, content_type: str, max_files: int, max_fields: int) -> list[Part]:
    """Fields and files of a form, in their order.

    Raises:
        Refused: the body is not a form, or has more parts than allowed.
    """
    parts = split_form(body, content_type, max_files, max_fields)
    if parts is None:
        parts = _run_without_loop(parse_by_starlette(body, content_type, max_files, max_fields))
    return parts


def split_form(body: bytes, content_type: str, max_files: int, max_fields: int) -> list[Part] | None:
    r"""The parts of a form in the usual shape; None for any other body.

    >>> body = b'--x\r\nContent-Disposition: form-data; name="top"\r\n\r\n3\r\n--x--\r\n'
    >>> split_form(body, "multipart/form-data; boundary=x", 1, 1)
    [('top', None, '3')]
    """
    boundary = _TYPE.fullmatch(content_type)
    if boundary is None:
        return None
    delimiter = b"\r\n--" + boundary[1].encode()
    if not body.startswith(delimiter[2:]):
        return None
    parts: list[Part] = []
    files, position = 0, len(delimiter) - 2
    while not body.startswith(b"--", position):
        headers = _HEADERS.match(body, position, position + _MOST_HEADER)
        end = body.find(delimiter, headers.end()) if headers else -1
        if headers is None or end < 0:
            return None
        content, filename = body[headers.end() : end], headers[2]
        if filename is None:
            text = _decode_text(content)
            if text is None:
                return None
            parts.append((headers[1].decode(), None, text))
        else:
            files += 1
            parts.append((headers[1].decode(), filename.decode(), content))
        if files > max_files or len(parts) - files > max_fields:
            return None
        position = end + len(delimiter)
    return parts if body[position:] in (b"--", b"--\r\n") else None


def _decode_text(content: bytes) -> str | None:
    """The text of a field; None where it is too long or not UTF-8."""
    try:
        return content.decode() if len(content) <= _MOST_FIELD_BYTES else None
    except UnicodeDecodeError:
        return None


class _FormParser(MultiPartParser):
    """Starlette's parser, without temporary files, and with few parameters per header: many take minutes."""

    spool_max_size = 2**40  # the body is in memory already
    parameters = 0  # of the current header

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        """A piece of a header's value."""
        self.parameters += data.count(b";", start, end)
        if self.parameters > _MOST_PARAMETERS:
            raise MultiPartException(f"A header of a part has more than {_MOST_PARAMETERS} parameters.")
        super().on_header_value(data, start, end)

    def on_header_end(self) -> None:
        """The end of a header."""
        self.parameters = 0
        super().on_header_end()


async def parse_by_starlette(body: bytes, content_type: str, max_files: int, max_fields: int) -> list[Part]:
    """What `parse_form` returns, by Starlette's parser."""

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = _FormParser(
        Headers({"content-type": _CHARSET.sub("", content_type)}),
        stream(),
        max_files=max_files,
        max_fields=max_fields,
        max_part_size=_MOST_FIELD_BYTES,
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        too_much = "maximum" in error.message.lower()
        raise Refused(413 if too_much else 400, f"the form cannot be read: {error.message}") from None
    except (ValueError, LookupError):  # of a boundary or a charset that is none
        raise Refused(400, "the form cannot be read") from None
    return [
        (name, None, value) if isinstance(value, str) else (name, value.filename, value.file.read())
        for name, value in form.multi_items()
    ]


def _run_without_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise RuntimeError("the coroutine waits")
