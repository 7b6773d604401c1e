"""Notices differ from errors at the first word: the command line prints errors as "dear: ..."."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import dear
from dear.utils import notices

SOURCE = Path(dear.__file__).parent


@pytest.mark.parametrize("log", [notices.note, notices.warn])
def test_prefix(log, caplog) -> None:
    caplog.set_level(logging.INFO, "dear")
    log(f"a sentence of {log.__name__}")
    assert [record.getMessage() for record in caplog.records] == [f"notice: a sentence of {log.__name__}"]


def test_no_log_message_looks_like_an_error() -> None:
    pattern = re.compile(r"log\.(?:info|warning|error)\(\s*f?\"(?:dear|note|warning):")
    assert pattern.search('_log.warning(\n    "dear: too few images"')
    assert [str(file) for file in SOURCE.rglob("*.py") if pattern.search(file.read_text("utf-8"))] == []
