"""The guide to extending is true: its blocks run, and the method it shows is a method."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_clip

from dear.data import few_shot, open_data
from dear.errors import UsageError
from dear.methods import METHODS

GUIDE = Path(__file__).parents[2] / "docs/extending.md"


def test_the_blocks_of_the_guide_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    assert len(blocks) >= 6
    lines = [line for line in blocks[0].splitlines() if line.strip()]
    assert len(lines) < 30
    session: dict[str, object] = {"__name__": "guide"}
    try:
        with torch.random.fork_rng():
            for block in blocks:
                exec(compile(block, str(GUIDE), "exec", dont_inherit=True), session)
        assert session["accuracy"] is not None
    finally:
        METHODS.pop("head-scale", None)
        METHODS.pop("taskres", None)


def test_the_command_of_the_guide_knows_the_method(tmp_path: Path) -> None:
    """Adapted, calibrated, saved, evaluated and asked, without a line for it anywhere."""
    blocks = re.findall(r"^```(?:python|py)\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    (tmp_path / "taskres.py").write_text(f"{blocks[0]}\n{blocks[1]}")
    (tmp_path / "my_dear.py").write_text(blocks[2])

    def run(words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "my_dear.py", *words.split(), "--device", "cpu"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    for split, shots in (("train", 5), ("test", 1)):
        images = open_data("world:textures", split)
        images = few_shot(images.select_classes(images.classes[:2]), shots, 1)
        for index, label in enumerate(images.labels.tolist()):
            path = tmp_path / "photos" / split / images.classes[label] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            images.image(index).save(path)
    done = run("adapt --data photos --epochs 1 --no-check --method taskres --set scale=0.2 --out run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/config.json").read_text())["options"] == {"scale": 0.2}
    assert (tmp_path / "run/calibration.json").exists()
    images.image(0).save(tmp_path / "a.png")
    answer = run("predict run a.png --json --reject")
    assert answer.returncode == 0, answer.stderr
    assert len(json.loads(answer.stdout)["predictions"][0]["classes"]) == 2
    refused = run("predict run a.png --classes fox,owl")
    assert refused.returncode == 2
    assert "taskres" in refused.stderr


def test_a_method_of_the_guide_is_evaluated_as_its_formula(tmp_path: Path) -> None:
    block = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)[0]
    session: dict[str, Any] = {"__name__": "guide"}
    exec(compile(block, str(GUIDE), "exec", dont_inherit=True), session)
    method = session["TaskRes"](tiny_clip(dtype=torch.float32), ("red", "green", "blue"), scale=0.3)
    with torch.no_grad():
        method.residual.normal_()
        pixels = torch.randn(4, 3, 24, 24)
        texts = method.prompts.frozen + 0.3 * method.residual
        cosines = torch.nn.functional.cosine_similarity(
            method.clip.encode_image(pixels)[:, None], texts[None], dim=-1
        )
    torch.testing.assert_close(method.logits(pixels), method.clip.logit_scale * cosines)
    for other in (["a", "b", "c"], ["a", "b"]):  # as many classes as trained ones, too
        with pytest.raises(UsageError, match="taskres"):
            method.with_classes(other)


def test_the_guide_names_files_that_exist() -> None:
    root = GUIDE.parents[1]
    for path in re.findall(r"`((?:src|tests)/[\w/.]+)`", GUIDE.read_text()):
        assert (root / path).exists(), path
