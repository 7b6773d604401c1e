"""Declared schemas: what is refused, and that the message says where and what is expected."""

from __future__ import annotations

import json
from typing import Annotated

import pytest
from msgspec import Meta

from dear.errors import DearError, RunError
from dear.utils.schema import Line, Strict, Whole, Word, check, decode


class Part(Strict):
    count: Annotated[int, Meta(ge=1, le=9)]
    name: Word = "part"
    note: Line = ""
    shares: dict[Word, float] = {}  # noqa: RUF012 (msgspec copies it)


class Table(Strict):
    parts: list[Part]
    seen: Whole = 0

    def __post_init__(self) -> None:
        if len(self.parts) != len({part.name for part in self.parts}):
            raise ValueError("two parts have the same name")


GOOD = {"parts": [{"count": 3, "note": "größer", "shares": {"a": 1, "b": 0.5}}], "seen": 4}

WRONG = [
    ({"count": 0}, "at parts[0].count: expected `int` >= 1"),
    ({"count": True}, "at parts[0].count: expected `int`, got `bool`"),
    ({"count": "3"}, "at parts[0].count: expected `int`, got `str`"),
    ({"count": 3.0}, "at parts[0].count: expected `int`, got `float`"),
    ({"extra": 1}, "at parts[0]: contains unknown field `extra`"),
    ({"name": " "}, "at parts[0].name: expected plain text that is not blank, without control characters"),
    ({"name": "x" * 81}, "at parts[0].name: expected `str` of length <= 80"),
    ({"note": "a\x1b[2J"}, "at parts[0].note: expected plain text without control characters"),
    ({"note": "a\nb"}, "at parts[0].note: expected plain text without control characters"),
    ({"shares": {"a": "1"}}, "at parts[0].shares[a value]: expected `float`, got `str`"),
    ({"shares": {"\u202e": 1}}, "at parts[0].shares: expected plain text"),
]


def test_what_fits_is_read() -> None:
    read = decode(json.dumps(GOOD), Table, "a.json", "table")
    assert read.parts[0].count == 3
    assert read.parts[0].shares == {"a": 1.0, "b": 0.5}
    assert read.parts[0].name == "part"
    with pytest.raises(AttributeError):
        read.seen = 5


@pytest.mark.parametrize(("change", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_what_does_not_fit_is_named_with_its_place(change: dict, sentence: str) -> None:
    document = {**GOOD, "parts": [{**GOOD["parts"][0], **change}]}
    with pytest.raises(DearError) as caught:
        decode(json.dumps(document), Table, "a.json", "table")
    assert str(caught.value).startswith("a.json: is not a valid table (")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"parts": [], "parts": []}', "'parts' occurs twice"),
        ('{"parts": [{"count": NaN}]}', "NaN"),
        ('{"parts": [{"count": 1, "shares": {"a": 1e999}}]}', "too large"),
        ('{"parts": ' + "[" * 200 + "]" * 200 + "}", "nested too deeply"),
        ('{"parts": [], "seen": 9007199254740992}', "at seen: expected `int` <= 9007199254740991"),
        ("[]", "expected `object`, got `array`"),
        ("{}", "lacks the required field `parts`"),
        ('{"parts": [{"count": 1}, {"count": 2}]}', "two parts have the same name"),
    ],
)
def test_refused_texts(text: str, sentence: str) -> None:
    with pytest.raises(DearError) as caught:
        decode(text, Table, "a.json", "table")
    assert sentence in str(caught.value)


def test_size_and_class_of_the_error() -> None:
    with pytest.raises(RunError, match=r"a\.json: .*10 bytes"):
        decode(json.dumps(GOOD), Table, "a.json", "table", error=RunError, max_bytes=10)
    with pytest.raises(RunError, match="`parts`"):
        check({}, Table, "a.json", "table", error=RunError)
