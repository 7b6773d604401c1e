"""What a release relies on: one version, floors without known vulnerabilities, container files that fit."""

from __future__ import annotations

import importlib.util
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


def test_an_installation_reports_its_progress() -> None:
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    output = """\
    WARNING: Location 'file:///nowhere/simple/numpy/' is ignored: it is neither a file nor a directory.
    Collecting numpy>=2.0 (from dear-vlm==0.2.0)
      Downloading numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (6.6 kB)
    Requirement already satisfied: rich in ./lib (15.0.0)
      Downloading https://host/torch-2.13.0-cp311-none-any.whl (184.2 MB)
      Using cached numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (16.6 MB)
    Installing collected packages: numpy, torch
    ERROR: no space left
    """
    lines = module.Lines(expected=3)
    shown = [text for line in output.splitlines() if (text := lines(line.strip())) is not None]
    assert [text.split() for text in shown[:2]] == [
        ["1", "of", "about", "3:", "numpy", "2.4.6"],
        ["2", "of", "about", "3:", "torch", "2.13.0", "(184.2", "MB)"],
    ]
    assert "2 packages" in shown[2]
    assert shown[3].startswith("ERROR")
    assert lines.total == 2


@pytest.mark.network
def test_every_dependency_has_wheels_on_every_platform() -> None:
    words = [sys.executable, str(ROOT / "scripts" / "check-wheels")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 16
