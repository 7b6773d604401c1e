"""The documentation site: every guide is in it, every module it describes exists, nothing comes from afar."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_guide_is_in_the_navigation():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for path in (ROOT / "docs").rglob("*.md"):
        if path.parent.name == "results":
            continue  # generated tables, outside the navigation on purpose
        assert path.relative_to(ROOT / "docs").as_posix() in listed, f"add {path.name} to nav in mkdocs.yml"


def test_every_linked_page_exists():
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_module_of_the_reference_exists():
    names = [
        name
        for path in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)", path.read_text(encoding="utf-8"), re.M)
    ]
    assert len(names) > 20
    for name in names:
        importlib.import_module(name)


def test_the_glossary_has_one_entry_per_word():
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.M)
    words = [row.strip() for row in rows if row.strip() not in ("word", "---")]
    assert len(words) == len(set(words))


def test_the_site_builds_and_loads_nothing_from_other_hosts(tmp_path):
    pytest.importorskip("zensical", reason="the extra `docs` is not installed")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?https?:", page.read_text("utf-8"))
        assert not loaded, page
    assert "discover_roles" in (tmp_path / "site" / "api" / "heads.html").read_text("utf-8")
