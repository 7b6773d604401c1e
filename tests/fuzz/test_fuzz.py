"""A few seconds of `make fuzz`, and the fuzzer itself: it must find what is put before it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fuzzing
import pytest
import readers

from dear.errors import DearError
from dear.utils.schema import parse_json

CASES = {"resume-state": 3, "cell": 6, "run-config": 8, "run-roles": 8, "adapter": 8, "archive-file": 8}


@pytest.fixture(scope="module")
def watch() -> fuzzing.Watch:
    return fuzzing.Watch()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", readers.NAMES)
def test_every_reader_answers_rightly_or_refuses_with_a_sentence(name: str, tmp_path: Path, watch) -> None:
    target = readers.find(name)(tmp_path)
    wanted = max(CASES.get(name, 40), len(target.seeds))
    result = fuzzing.fuzz(target, wanted, seed=7, folder=tmp_path, keep=tmp_path / "kept", watch=watch)
    assert result.failures == []
    assert result.cases == result.answered + result.refused == wanted
    assert result.answered >= len(target.seeds)


def _careless(data: bytes) -> None:
    if data.count(b"[") > 1:
        raise IndexError("a fault of the reader")
    parse_json(data.decode("utf-8", "replace"), "x")


def test_the_fuzzer_finds_a_careless_reader_and_keeps_what_broke_it(tmp_path: Path, watch) -> None:
    target = fuzzing.Target("careless", [b"[1, 2]"], _careless)
    result = fuzzing.fuzz(target, 150, 1, tmp_path, tmp_path / "kept", watch)
    assert result.failures
    kept = sorted((tmp_path / "kept").glob("careless-*.bin"))
    assert kept
    with pytest.raises(IndexError):
        _careless(kept[0].read_bytes())
    again = fuzzing.fuzz(target, 150, 1, tmp_path, tmp_path / "again", watch)
    assert [line.rpartition("/")[2] for line in again.failures] == [
        line.rpartition("/")[2] for line in result.failures
    ]


@pytest.mark.parametrize(
    "deed",
    [
        lambda folder: os.system("true"),
        lambda folder: subprocess.run([sys.executable, "--version"], check=True, capture_output=True),
        lambda folder: (folder.parent / "outside").write_text("x"),
    ],
)
def test_the_fuzzer_sees_programs_and_files_that_a_reader_must_not_touch(tmp_path: Path, watch, deed) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    target = fuzzing.Target("busy", [b"x"], lambda data: deed(inner))
    result = fuzzing.fuzz(target, 1, 1, inner, tmp_path / "kept", watch)
    assert "no reader may" in result.failures[0]


def test_a_refusal_must_say_something(tmp_path: Path, watch) -> None:
    def silent(data: bytes) -> None:
        raise DearError("")

    result = fuzzing.fuzz(fuzzing.Target("silent", [b"x"], silent), 1, 1, tmp_path, tmp_path / "kept", watch)
    assert "without a word" in result.failures[0]
