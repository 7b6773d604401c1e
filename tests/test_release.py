"""What a release relies on: one version, floors without known vulnerabilities, container files that fit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dear

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_one_version() -> None:
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    assert cited is not None
    assert PROJECT["version"] == dear.__version__ == cited[1]
    assert f"## {dear.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_floors() -> None:
    script = (ROOT / "scripts" / "check-vulnerabilities").read_text(encoding="utf-8")
    check = script.split("<<'CHECK'\n")[1].split("\nCHECK\n")[0]
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "containers").iterdir()), ids=lambda path: path.name)
def test_container_files(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for extra in re.search(r"\.\[([\w,]+)\]", text)[1].split(","):
        assert extra in PROJECT["optional-dependencies"]
    for source in re.findall(r"^COPY (.+) \S+$", text, re.M):
        for name in source.split():
            assert (ROOT / name).exists(), name
    if shutil.which("hadolint"):
        subprocess.run(["hadolint", str(path)], check=True)
