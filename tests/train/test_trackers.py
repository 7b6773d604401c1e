"""What a tracker reads back is what the log said."""

import sys
from types import SimpleNamespace

import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip

from dear.errors import UsageError
from dear.methods import DeAR
from dear.runs.recipe import Recipe
from dear.train.run import train
from dear.train.trackers import Tracker, tracked_steps


def scalars(folder):
    """tag -> [(step, value)], read by TensorBoard's own reader."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_trainings_log_is_written_once_a_line(tmp_path):
    pytest.importorskip("tensorboard")
    model = DeAR(tiny_clip(dtype=torch.float32), ["red", "green"], roles=mixed_roles())
    with tracked_steps(f"tensorboard:{tmp_path}") as progress:
        done = train(model, Colors(classes=2, each=4), Recipe(epochs=3, batch=4), progress=progress)
    read = scalars(tmp_path)
    assert [step for step, _ in read["train/loss"]] == [line["step"] for line in done.lines]
    assert read["train/ce"][-1][1] == pytest.approx(done.lines[-1]["ce"], rel=1e-5)


def test_results_are_charts_by_data_set_and_curves_by_method(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = Tracker(f"tensorboard:{tmp_path}")
    tracker.result("coop", "world:textures", 1, {"default": {"base": 0.5, "novel": None}})
    tracker.result("../dear", "world:textures", 1, {"fused": {"base": 0.75}})
    tracker.close()
    assert scalars(tmp_path / "coop") == {"world-textures/base": [(1, 0.5)]}
    assert scalars(tmp_path / "dear") == {"world-textures/base/fused": [(1, 0.75)]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["coop", "dear"]


def test_without_a_folder_nothing_is_written_or_needed():
    with tracked_steps(None) as progress:
        progress(1, 2, {"step": 1})


@pytest.mark.parametrize("tool", ["tensorboard", "mlflow", "wandb", "trackio"])
def test_without_the_package_there_is_a_command(monkeypatch, tool):
    package = "torch.utils.tensorboard.writer" if tool == "tensorboard" else tool
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"pip install .*{tool}"), tracked_steps(f"{tool}:x"):
        pass


def test_an_unknown_tool_is_named():
    with pytest.raises(UsageError, match="'comet:x'"):
        Tracker("comet:x")


@pytest.mark.parametrize("tool", ["wandb", "trackio"])
def test_tools_with_the_functions_of_wandb(monkeypatch, tool):
    calls = []

    def init(project, name):
        calls.append((project, name))
        return SimpleNamespace(
            log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("end")
        )

    monkeypatch.setitem(sys.modules, tool, SimpleNamespace(init=init))
    with tracked_steps(f"{tool}:photos") as progress:
        for _ in range(2):  # a line counts once
            progress(3, 9, {"step": 3, "epoch": 1, "loss": 0.5})
    assert calls == [("photos", None), ({"train/loss": 0.5}, 3), "end"]


@pytest.mark.parametrize("place", ["{}/mlruns", "sqlite:///{}/a.db"])
def test_mlflow_reads_back_what_was_logged(tmp_path, place):
    mlflow = pytest.importorskip("mlflow")
    place = place.format(tmp_path)
    with tracked_steps(f"mlflow:{place}") as progress:
        progress(1, 2, {"step": 1, "loss": 0.5})
        progress(2, 2, {"step": 2, "loss": 0.25})
    client = mlflow.MlflowClient(place if ":" in place else f"sqlite:///{place}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("dear").experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 0.25)]
