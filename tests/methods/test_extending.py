"""The guide to extending is true: its blocks run, and the method it shows is a method."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from dear.methods import METHODS

GUIDE = Path(__file__).parents[2] / "docs/extending.md"


def test_the_blocks_of_the_guide_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    assert len(blocks) >= 6
    lines = [line for line in blocks[0].splitlines() if line.strip()]
    assert len(lines) <= 60
    session: dict[str, object] = {"__name__": "guide"}
    try:
        with torch.random.fork_rng():
            for block in blocks:
                exec(compile(block, str(GUIDE), "exec", dont_inherit=True), session)
        assert session["accuracy"] is not None
    finally:
        METHODS.pop("head-scale", None)


def test_the_command_of_the_guide_knows_the_method(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(?:python|py)\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    (tmp_path / "head_scale.py").write_text(f"{blocks[0]}\n{blocks[1]}")
    (tmp_path / "my_dear.py").write_text(blocks[2])
    words = "adapt --data world:textures --shots 1 --epochs 1 --method head-scale --set pull=0.5 --out run"
    done = subprocess.run(
        [sys.executable, "my_dear.py", *words.split(), "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/config.json").read_text())["options"] == {"layers": 4, "pull": 0.5}


def test_the_guide_names_files_that_exist() -> None:
    root = GUIDE.parents[1]
    for path in re.findall(r"`((?:src|tests)/[\w/.]+)`", GUIDE.read_text()):
        assert (root / path).exists(), path
