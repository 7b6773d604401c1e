"""JSON that is deep, huge, doubled or half a character, in every place where JSON is read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import readers

from dear.errors import DearError
from dear.utils import files
from dear.utils.files import read_json
from dear.utils.schema import parse_json

# Readers whose input is one JSON document, or lines of them.
DOCUMENTS = ("json", "role-map", "split-file", "shard-index", "hf-config", "openclip-config")
DOCUMENTS += ("run-config", "run-roles", "metrics", "cell", "table-jsonl", "draw", "corpus", "log")

HOSTILE = {
    "deep": "[" * 100_000,
    "deep and closed": "[" * 50_000 + "]" * 50_000,
    "deep enough to trip what comes after": '{"a":' * 150 + "1" + "}" * 150,
    "half a character": '{"a": "\\ud800"}',
    "a number beyond all": '{"a": 1e999}',
    "a whole number beyond all": '{"a": ' + "9" * 5000 + "}",
    "not a number": '{"a": NaN}',
    "nothing": "",
    "a null byte": "\0",
    "not finished": '{"a": [1, 2',
}


@pytest.mark.parametrize("place", DOCUMENTS)
def test_hostile_json_is_refused_everywhere(place: str, tmp_path: Path) -> None:
    target = readers.find(place)(tmp_path)
    for text in HOSTILE.values():
        if place == "log" and not text:
            continue  # a log may be empty
        with pytest.raises(DearError):
            target.read(text.encode())


@pytest.mark.parametrize("place", DOCUMENTS)
def test_a_key_that_stands_twice_is_refused_everywhere(place: str, tmp_path: Path) -> None:
    target = readers.find(place)(tmp_path)
    seed = next(data for data in target.seeds if data.lstrip()[:1] == b"{")
    first = json.loads(seed.split(b"\n--\n")[0].split(b"\n{")[0])
    key, value = next(iter(first.items()))
    doubled = seed.replace(
        b"{", b"{" + json.dumps(key).encode() + b":" + json.dumps(value).encode() + b",", 1
    )
    with pytest.raises(DearError, match=re.escape(repr(key))):
        target.read(doubled)


def test_files_that_are_too_large_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text('"' + "x" * 1000 + '"')
    with pytest.raises(DearError, match="500"):
        read_json(path, "role map", max_bytes=500)
    for name in ("huge.json", "huge.jsonl", "huge.csv", "huge.txt"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(files.MAX_TEXT_BYTES + 1)  # a sparse file: it takes no room
        with pytest.raises(DearError, match=f"{files.MAX_TEXT_BYTES:,} bytes"):
            files.read_text(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_pipes_and_devices_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name in ("pipe.json", "zero.json"):
        with pytest.raises(DearError, match=re.escape(name)):
            read_json(tmp_path / name)
    with pytest.raises(DearError, match=re.escape(str(tmp_path))):
        read_json(tmp_path)


def test_what_is_well_meant_is_still_read() -> None:
    assert parse_json('{"a": [1, 2.5, -3e10, "é\\u00e9\\ud83d\\ude00", null, true]}', "x")["a"][3] == "éé😀"
    assert parse_json("[" * 99 + "]" * 99, "x")
    assert parse_json("[" + ",".join(["[1]"] * 5000) + "]", "x")[4999] == [1]
