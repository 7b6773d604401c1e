"""Forms in the usual shape are read as Starlette reads them; everything else is left to Starlette."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from dear.serve.errors import Refused
from dear.serve.forms import parse_by_starlette, parse_form, split_form

LIMITS = (4, 4)  # files, fields


def encoded(files, data, boundary="a-boundary"):
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    request = httpx.Request("POST", "http://a", files=files, data=data, headers=headers)
    return request.read(), request.headers["content-type"]


def outcome(parse, *arguments):
    try:
        return parse(*arguments)
    except Refused as error:
        return error.http_status


def by_starlette(*arguments):
    return outcome(lambda *values: asyncio.run(parse_by_starlette(*values)), *arguments)


@pytest.mark.parametrize(
    ("files", "data"),
    [
        (
            [("files", ("a b.jpg", b"\xff\xd8\r\n--a-bound\r\n", "image/jpeg"))],
            {"top": "3", "classes": "é, +b"},
        ),
        ([("files", ("", b"", "image/jpeg")), ("files", ("b.jpg", b"--\r\n"))], {}),
        ([], {"top": ["1", "2"], "a b": ""}),
    ],
)
def test_usual_forms_are_split(files, data):
    body, kind = encoded(files or [("files", ("only.jpg", b"x"))], data)
    parts = split_form(body, kind, *LIMITS)
    assert parts is not None
    assert parts == by_starlette(body, kind, *LIMITS)


@pytest.mark.parametrize("files", [5, 6])
def test_too_many_files_are_refused(files):
    body, kind = encoded([("files", (f"{n}.jpg", b"x")) for n in range(files)], {})
    assert split_form(body, kind, *LIMITS) is None
    assert outcome(parse_form, body, kind, *LIMITS) == 413


def test_long_and_foreign_fields_are_left_to_starlette():
    for value in ("x" * (512 * 1024 + 1), b"\xff\xfe"):
        body, kind = encoded([("files", ("a.jpg", b"x"))], {"top": "V"})
        raw = value.encode() if isinstance(value, str) else value
        body = body.replace(b"\r\n\r\nV\r\n", b"\r\n\r\n" + raw + b"\r\n")
        assert split_form(body, kind, *LIMITS) is None
        assert outcome(parse_form, body, kind, *LIMITS) == by_starlette(body, kind, *LIMITS)


def test_mutated_forms_are_read_as_starlette_reads_them():
    generator = random.Random(0)
    body, kind = encoded(
        [("files", ("a.jpg", b"\xff\xd8--a-boundary", "image/jpeg")), ("files", ("b c.png", b""))],
        {"top": "3"},
    )
    pieces = [
        b"\r\n",
        b"--",
        b"--a-boundary",
        b'"',
        b";",
        b"\\",
        b" ",
        b"\r",
        b"\n",
        b"\0",
        b"=",
        b"%22",
        b"\xc3\xa9",
    ]
    pieces += [
        b'Content-Disposition: form-data; name="x"\r\n\r\n',
        b"Content-Type: a/b\r\n",
        b"filename*=utf-8''x",
    ]
    split = 0
    for _ in range(3000):
        mutated = bytearray(body)
        for _ in range(generator.choice((1, 1, 2, 4))):
            place = generator.randrange(len(mutated) + 1)
            remove = generator.choice((0, 0, 1, 2, 8))
            mutated[place : place + remove] = generator.choice(pieces) if generator.random() < 0.8 else b""
        parts = split_form(bytes(mutated), kind, *LIMITS)
        if parts is not None:
            split += 1
            assert parts == by_starlette(bytes(mutated), kind, *LIMITS), bytes(mutated)
    assert 300 < split < 2900
