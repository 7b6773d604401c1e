"""Purification from the command line: every option is reachable, and the result folds into a plain CLIP."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dear
from dear.cli import build_app
from dear.errors import UsageError
from dear.methods import ZeroShot
from dear.methods.options import fit_options
from dear.methods.purify import PurifyConfig
from dear.runs.folder import load_run
from dear.utils.pairs import parse_pairs

PAGE = Path(__file__).parents[2] / "docs/purification.md"
ADAPT = [
    *("adapt", "--data", "world:domains", "--method", "purify", "--shots", "1", "--epochs", "1"),
    *("--no-calibrate", "--no-check"),
]


def call(*words: str) -> str:
    done = CliRunner().invoke(build_app(), list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("purify") / "run"
    options = ["lora=shared", "mmd_to=all", "bandwidths=1,2.5", "weight=2", "rank=1", "last_rank=3"]
    options += ["head_dropout=0.2"]
    call(*ADAPT, "--device", "cpu", "--out", str(folder), *(w for o in options for w in ("--set", o)))
    return folder


def test_options_reach_the_run(run: Path) -> None:
    kept = json.loads((run / "config.json").read_text())["options"]
    assert kept == {
        "lora": "shared",
        "gates": True,
        "gate_rate": 20.0,
        "rank": 1,
        "last_rank": 3,
        "weight": 2.0,
        "mmd_to": "all",
        "bandwidths": [1.0, 2.5],
        "head_dropout": 0.2,
    }
    assert len(json.loads((run / "metrics.json").read_text())["gates"]) == 12


def test_merged_is_a_backbone_with_the_same_answers(run: Path, tmp_path: Path) -> None:
    facts = json.loads(call("export", str(run), "--merged", str(tmp_path / "plain"), "--json"))
    method, plain = load_run(run), dear.load(tmp_path / "plain")
    size = plain.config.vision.image_size
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    folded = method.logits(pixels)
    answers = ZeroShot(plain, method.classes, template=facts["template"]).logits(pixels)
    torch.testing.assert_close(answers, folded, rtol=0, atol=1e-4)
    frozen = ZeroShot(method.clip, method.classes, template=method.template).logits(pixels)
    assert (frozen - folded).abs().max() > 1e-3
    assert facts["numbers"] == sum(p.numel() for p in method.clip.parameters())


def test_the_page_about_purification_is_true(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    monkeypatch.chdir(run.parent)
    session: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), session)
    assert Path("gates.html").stat().st_size > 1000
    assert session["strongest"].sum(dim=1).tolist() == [3.0] * len(session["strongest"])
    for field in dataclasses.fields(PurifyConfig):
        row = next(line for line in text.splitlines() if re.match(rf"\| .*`{field.name}`.*\|", line))
        shown = str(field.default).lower().removesuffix(".0")
        assert shown in row.split("|")[2], f"{field.name}: the page shows another default"
    for option in re.findall(r"--set purify\.([a-z]\S+?)`", text):
        fitted = fit_options(PurifyConfig, parse_pairs([option], "--set"))
        assert PurifyConfig(**fitted) != PurifyConfig(), option


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "onnx"),
        (["--onnx", "x.onnx", "--merged", "x"], "onnx"),
        (["--merged", "x", "--classes", "cat"], "classes"),
    ],
)
def test_export_says_what_is_missing(run: Path, words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call("export", str(run), *words)


def test_a_grid_reads_options_in_the_same_way(tmp_path: Path) -> None:
    words = ["bench", "leave-one-domain-out", "--methods", "purify", "--datasets", "world:domains"]
    with pytest.raises(UsageError, match=r"weight .*'much'"):
        call(*words, "--out", str(tmp_path), "--device", "cpu", "--set", "purify.weight=much")
