"""Forms: read as a library reads them, within bounds, and refused where they cannot be read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from dear.serve.errors import Refused
from dear.serve.multipart import Part, read_parts

TYPE = "multipart/form-data; boundary=xyz"
PIECES = [
    b"--xyz", b"--xyz--", b"\r\n", b"\r", b"\n", b"-", b"--", b"xyz", b"a", b": ", b";", b'"', b"\\",
    b"\r\n--xyz", b"\r\n--xyz\r\n", b"\r\n--xyz--\r\n", b"\r\n\r\n", b"\xff\x00\r", b"Content-Type: a/b\r\n",
    b'Content-Disposition: form-data; name="files"; filename="a b.jpg"\r\n\r\n',
    b'content-disposition: form-data; name="top"\r\n\r\n',
    b"Content-Disposition: form-data; name=top; filename=\"C:\\\\a.png\"\r\n\r\n",
]  # fmt: skip


def by_library(body: bytes) -> list[Part] | None:
    """What python_multipart finds; None where it refuses, or where the body has no end."""
    found, header, ended = [], [b"", b""], []

    def end_header():
        if header[0].lower() == b"content-disposition":
            options = parse_options_header(header[1])[1]
            found[-1][0] = options.get(b"name", b"").decode("utf-8", "replace")
            if b"filename" in options:
                found[-1][1] = options[b"filename"].decode("utf-8", "replace")
        header[:] = [b"", b""]

    def add(which):
        def note(data, start, end):
            header[which] += data[start:end]

        return note

    def content(data, start, end):
        found[-1][2] += data[start:end]

    parser = MultipartParser(b"xyz", {
        "on_part_begin": lambda: found.append(["", None, b""]), "on_header_field": add(0),
        "on_header_value": add(1), "on_header_end": end_header, "on_part_data": content,
        "on_end": lambda: ended.append(True),
    })  # fmt: skip
    try:
        parser.write(body)
    except FormParserError:
        return None
    return [Part(*one) for one in found] if ended else None


def by_service(body: bytes) -> list[Part] | None:
    try:
        return read_parts(body, TYPE, 1000)
    except Refused:
        return None


@given(st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join), st.booleans())
@settings(max_examples=1500, deadline=None)
def test_any_body_is_read_as_the_library_reads_it(body, framed):
    body = (
        b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + body + b"\r\n--xyz--"
        if framed
        else body
    )
    assert by_service(body) == by_library(body)


def test_files_and_fields_in_their_order():
    body = b'--xyz\r\nContent-Disposition: form-data; name="top"\r\n\r\n2\r\n'
    body += b'--xyz\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n\r\n--xy\r\n'
    body += b"--xyz--\r\nwhat follows is not read"
    assert read_parts(body, TYPE, 2) == [Part("top", None, b"2"), Part("files", "a.png", b"\r\n--xy")]
    quoted = 'Multipart/Form-Data; charset=utf-8; Boundary="xyz"'
    assert read_parts(body, quoted, 2) == read_parts(body, TYPE, 2)


@pytest.mark.parametrize(
    ("status", "sentence", "body", "kind"),
    [
        (413, "more than 1 parts", b"--xyz\r\n\r\na\r\n--xyz\r\n\r\nb\r\n--xyz--", TYPE),
        (413, "more than 524,288 bytes", b"--xyz\r\n\r\n" + b"a" * 600_000 + b"\r\n--xyz--", TYPE),
        (400, "more than 8,192 bytes", b"--xyz\r\na: " + b"a" * 9000 + b"\r\n\r\nb\r\n--xyz--", TYPE),
        (400, "more than 8,192 bytes", b"--xyz\r\na: " + b"a" * 9000, TYPE),
        (400, "too early", b"--xyz\r\n\r\na\r\n--xyz", TYPE),
        (400, "too early", b"--xyz\r\na: b", TYPE),
        (400, "boundary is missing or too long", b"--xyz--", "multipart/form-data"),
        (400, "boundary is missing or too long", b"--xyz--", "multipart/form-data; boundary=" + "x" * 201),
        (400, "does not begin", b"hello", TYPE),
    ],
)
def test_what_is_beyond_the_bounds_is_refused(status, sentence, body, kind):
    with pytest.raises(Refused, match=sentence) as refused:
        read_parts(body, kind, 1)
    assert refused.value.http_status == status
