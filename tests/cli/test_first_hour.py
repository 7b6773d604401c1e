"""The page "First hour": every command on it works, in the order of the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import food
import pytest
from typed import dear

PAGE = Path(__file__).parents[2] / "docs" / "first-hour.md"
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    food.photos(tmp_path / "food", each=6)
    food.backbone(tmp_path / "models" / "clip-vit-base-patch16")
    (tmp_path / "new").mkdir()
    for number, path in enumerate(sorted((tmp_path / "food").rglob("*.jpg"))[:3]):
        (tmp_path / "new" / f"{number}.jpg").write_bytes(path.read_bytes())
    count = 0
    for kind, text in BLOCKS:
        if kind == "python":
            pytest.importorskip("onnxruntime")
            exec(compile(text, str(PAGE), "exec"), {})
            continue
        for line in text.strip().splitlines():
            words = shlex.split(line)
            assert words[0] == "dear", line
            if words[1] == "adapt":
                words += ["--epochs", "2"]  # quicker; everything else is as on the page
            status, output = dear(*words[1:])
            assert status == 0, f"{line}\n{output}"
            count += 1
    assert count >= 12
    assert (tmp_path / "answers.csv").read_text().startswith("image,answer,class_1,probability_1")
    assert (tmp_path / "model.onnx").is_file()


def test_the_page_answers_what_was_asked() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for word in (
        "huggingface-cli download",
        "model.safetensors",
        "How many images",
        "Which method",
        "dear serve",
    ):
        assert word in text
