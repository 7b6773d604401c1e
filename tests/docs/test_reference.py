"""Generated pages are current: run `python scripts/reference.py` after a change."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name):
    assert (ROOT / name).read_text(encoding="utf-8") == PAGES[name]()
