"""What TensorBoard reads back is what the log said."""

import builtins

import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip

from dear.errors import UsageError
from dear.methods import DeAR
from dear.runs.recipe import Recipe
from dear.train.run import train
from dear.train.tensorboard import Board, logged


def scalars(folder):
    """tag -> [(step, value)], read by TensorBoard's own reader."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_a_trainings_log_is_written_once_a_line(tmp_path):
    pytest.importorskip("tensorboard")
    model = DeAR(tiny_clip(dtype=torch.float32), ["red", "green"], roles=mixed_roles())
    told = []
    with logged(tmp_path, lambda step, steps, line: told.append(step)) as progress:
        done = train(model, Colors(classes=2, each=4), Recipe(epochs=3, batch=4), progress=progress)
    read = scalars(tmp_path)
    assert told == list(range(1, done.steps + 1))
    assert [step for step, _ in read["train/loss"]] == [line["step"] for line in done.lines]
    assert read["train/ce"][-1][1] == pytest.approx(done.lines[-1]["ce"], rel=1e-5)


def test_results_are_charts_by_data_set_and_curves_by_method(tmp_path):
    pytest.importorskip("tensorboard")
    board = Board(tmp_path)
    board.result("coop", "world:textures", 1, {"default": {"base": 0.5, "novel": None}})
    board.result("../dear", "world:textures", 1, {"fused": {"base": 0.75}})
    board.close()
    assert scalars(tmp_path / "coop") == {"world-textures/base": [(1, 0.5)]}
    assert scalars(tmp_path / "dear") == {"world-textures/base/fused": [(1, 0.75)]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["coop", "dear"]


def test_without_a_folder_nothing_is_written_or_needed():
    with logged(None) as progress:
        progress(1, 2, {"step": 1})


def test_without_the_package_there_is_a_sentence(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **options):
        if "tensorboard" in name:
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r".\[tensorboard\]"), logged(tmp_path):
        pass
