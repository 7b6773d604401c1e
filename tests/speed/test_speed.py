"""What is measured is what is said: the steps agree, counts are right, tables stay whole."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from measure.clock import medians
from measure.count import dear_step
from measure.literal import LiteralStep
from measure.mmrl import mmrlpp_step
from tiny import mixed_roles, tiny_clip, token_ids
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from dear.cli import build_app
from dear.clip.config import ClipConfig
from dear.errors import DataError, UsageError
from dear.methods import DeAR
from dear.tasks.speed import SpeedOptions, add_rows, measure

PAPER = DeAR.preset("paper").options


def test_the_literal_step_has_our_losses_while_both_learn() -> None:
    clip = tiny_clip(dtype=torch.float32)
    model = DeAR(clip, ("red", "green", "blue"), roles=mixed_roles(), ids=token_ids(), **PAPER)
    literal = LiteralStep(model, token_ids())
    optimizers = [torch.optim.AdamW(p, 1e-2) for p in (model.parameters(), literal.learned.values())]
    for step in range(50):
        generator = torch.Generator().manual_seed(step)
        pixels = torch.randn(4, 3, 24, 24, generator=generator)
        labels = torch.randint(0, 3, (4,), generator=generator)
        losses = (model.loss(pixels, labels).total, literal.loss(pixels, labels))
        torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_counted_operations_are_those_pytorch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch's counter sees every product that is written out, and none by oneDNN
    monkeypatch.setenv("DEAR_KERNELS", "0")
    clip = tiny_clip(dtype=torch.float32).use_fused(False)
    options = {**PAPER, "first_layer": 4}
    model = DeAR(clip, ("red", "green", "blue"), roles=mixed_roles(), ids=token_ids(), **options)
    pixels, labels = torch.randn(2, 3, 24, 24), torch.tensor([0, 1])
    model.loss(pixels, labels)  # what is computed once per task is computed
    with FlopCounterMode(display=False) as forward:
        loss = model.loss(pixels, labels)
    with FlopCounterMode(display=False) as backward:
        loss.total.backward()
    count = dear_step(clip.config, 2, 3, words=7, first=4)
    ahead = count.embed + count.prefix + count.frozen + count.adapted + count.text + count.head // 3
    assert forward.get_total_flops() == pytest.approx(ahead, rel=0.02)
    # Autograd also computes what layer J's originals and the keys' own softmax need not have.
    assert backward.get_total_flops() == pytest.approx(count.adapted_backward + count.text_backward, rel=0.25)


def test_medians_alternate() -> None:
    order: list[str] = []
    medians({n: lambda n=n: order.append(n) for n in "ab"}, 3, warm_up=1)
    assert "".join(order) == "ab" + "ab" * 3


def test_rows_are_added_and_other_columns_refused(tmp_path: Path) -> None:
    table = tmp_path / "deep" / "t.csv"
    add_rows(table, [{"a": 1, "b": "x, y"}])
    add_rows(table, [{"a": 2, "b": "z"}])
    with table.open(newline="") as file:
        assert [row["b"] for row in csv.DictReader(file)] == ["x, y", "z"]
    with pytest.raises(DataError, match=r"t\.csv"):
        add_rows(table, [{"a": 1}])
    assert len(table.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": -1}, "batch.*-1"),
        ({"classes": 1}, "classes.*1"),
        ({"shots": 0}, "shots.*0"),
        ({"images": 1}, "images.*1"),
        ({"shape": "ViT-X"}, "ViT-X"),
        ({"method": "dera"}, "dera"),
    ],
)
def test_wrong_wishes_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SpeedOptions(**options)  # type: ignore[arg-type]


def test_a_folder_that_is_not_mmrl_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"trainers/mmrlpp\.py"):
        mmrlpp_step(tmp_path, ClipConfig.named("ViT-B-32"), token_ids(), torch.device("cpu"))


def test_the_estimate_follows_from_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClipConfig, "named", classmethod(lambda cls, name: tiny_clip().config))
    options = SpeedOptions(method="dear", classes=3, shots=5, batch=4, images=8)
    rows, adapt = measure(options, torch.device("cpu"))
    assert [row["what"] for row in rows] == ["read", "train", "answer"]
    assert all(row["images_per_s"] > 0 for row in rows)
    epochs = 10
    assert adapt["steps"] == epochs * 4  # 15 images in batches of 4
    read, step = (next(row for row in rows if row["what"] == what) for what in ("read", "train"))
    seconds = (15 * read["ms"] / read["images"] + adapt["steps"] * step["ms"]) / 1000
    assert adapt["seconds"] == pytest.approx(seconds, abs=0.06)
    rows, adapt = measure(SpeedOptions(method="zeroshot", images=8), torch.device("cpu"))
    assert [row["what"] for row in rows] == ["read", "answer"]
    assert adapt["steps"] == 0


def test_the_command_measures_and_keeps_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClipConfig, "named", classmethod(lambda cls, name: tiny_clip().config))
    table = tmp_path / "speed.csv"
    words = ["speed", "--device", "cpu", "--method", "coop", "--images", "8", "--csv", str(table)]
    result = CliRunner().invoke(build_app(), words)
    assert result.exit_code == 0, result.output
    assert "dear adapt --method coop" in result.output
    rows = list(csv.DictReader(table.open(newline="")))
    assert [row["what"] for row in rows] == ["read", "train", "answer"]


def test_an_unknown_shape_is_named() -> None:
    result = CliRunner().invoke(build_app(), ["speed", "--shape", "RN50"])
    assert isinstance(result.exception, UsageError)
    assert "ViT-B-16" in str(result.exception)
