"""Training and run folders: the loss falls, a killed run continues to the same bytes."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tiny import Colors, mixed_roles, tiny_clip, token_ids

from dear.errors import DearError, RunError
from dear.methods import DeAR, Loss, ZeroShot
from dear.runs.folder import load_run
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.train.run import Paused, train

RECIPE = Recipe(epochs=4, batch=5, lr=3e-2, warmup_epochs=1)
CLASSES = ("red", "green", "blue")


def method(seed: int = 1, **options) -> DeAR:
    clip = tiny_clip(dtype=torch.float32)
    return DeAR(clip, CLASSES, roles=mixed_roles(), ids=token_ids(), seed=seed, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "metrics.json"}


def test_loss_falls_and_training_accuracy_rises() -> None:
    model = method(lambda_reg=0.1)
    before = Model(model).evaluate(Colors()).accuracy["fused"]
    result = train(model, Colors(), Recipe(epochs=20, batch=5, lr=2e-3))
    assert result.lines[-1]["ce"] < 0.7 * result.lines[0]["ce"]
    assert Model(model).evaluate(Colors()).accuracy["fused"] > max(before, 0.8)


def test_a_run_folder_holds_what_was_learned_and_no_backbone(tmp_path: Path) -> None:
    model = method()
    train(model, Colors(), RECIPE, tmp_path / "run")
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "config.json",
        "adapter.safetensors",
        "roles.json",
        "metrics.json",
        "log.jsonl",
    }
    stored = safetensors.torch.load((tmp_path / "run/adapter.safetensors").read_bytes())
    assert stored["image_mean"].any()
    learned = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    assert set(learned) <= set(stored)
    assert sum(stored[name].numel() for name in learned) == model.trainable_parameters
    assert not set(stored) & set(model.clip.state_dict())
    widest = max(model.clip.config.embed_dim, len(model.classes))
    assert all(stored[name].numel() <= 2 * widest**2 for name in set(stored) - set(learned))  # statistics
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["method"] == "dear"
    assert config["fingerprint"] == model.clip.fingerprint
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    assert abs(sum(metrics["fusion_weights"].values()) - 1) < 1e-9
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert {"step", "epoch", "lr", "loss", "ce", "reg_image", "reg_text", "fusion"} <= set(lines[0])
    assert lines[0]["lr"] == 1e-5
    loaded = load_run(tmp_path / "run", tiny_clip(dtype=torch.float32))
    pixels = torch.randn(2, 3, 24, 24)
    assert torch.equal(loaded.logits(pixels), model.logits(pixels))


def test_same_seed_same_bytes_other_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(method(), Colors(), Recipe(epochs=2, batch=5, seed=seed), tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a")["adapter.safetensors"] != contents(tmp_path / "c")["adapter.safetensors"]


def test_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(method(), Colors(), Recipe(epochs=1, batch=5))
    assert torch.equal(torch.rand(3), expected)


def _attempt(folder: Path, kill_at: int, kill_in_write: int) -> None:
    """In a child process: continue the run, and die without warning at a step or inside the n-th write."""
    writes = 0
    replace = os.replace

    def dying_replace(source, target):
        nonlocal writes
        writes += 1
        if writes == kill_in_write:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = dying_replace

    def progress(step, steps, line):
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    train(method(), Colors(), RECIPE, folder, resume=True, progress=progress, save_every=2)


@pytest.mark.skipif(sys.platform != "linux", reason="kills forked children")
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_steps_and_resumed_gives_the_same_bytes(tmp_path: Path, seed: int) -> None:
    train(method(), Colors(), RECIPE, tmp_path / "whole")
    folder, rng, fork = tmp_path / "killed", random.Random(seed), multiprocessing.get_context("fork")
    for _ in range(6):
        in_write = rng.random() < 0.5
        kill_at = 0 if in_write else rng.randint(1, 12)
        child = fork.Process(target=_attempt, args=(folder, kill_at, rng.randint(1, 7) if in_write else 0))
        child.start()
        child.join(60)
        assert child.exitcode in (-signal.SIGKILL, 0)
    train(method(), Colors(), RECIPE, folder, resume=True)
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_disk_full_while_saving_leaves_the_old_state(tmp_path: Path, monkeypatch, where: str) -> None:
    train(method(), Colors(), RECIPE, tmp_path / "whole")
    real, saves = getattr(os, where), 0

    def full(*args):
        nonlocal saves
        saves += 1
        if saves > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, where, full)
    with pytest.raises(DearError, match="No space left"):
        train(method(), Colors(), RECIPE, tmp_path / "run", save_every=1)
    saved = (tmp_path / "run/resume.safetensors").read_bytes()
    assert safetensors.torch.load(saved)["method.v"].shape == (6,)
    assert not list((tmp_path / "run").glob(".*.part"))
    monkeypatch.setattr(os, where, real)
    train(method(), Colors(), RECIPE, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_ctrl_c_pauses_between_steps_and_resume_agrees(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    train(method(), Colors(), RECIPE, tmp_path / "whole")

    def press(step, steps, line):
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Paused, match="step 4"):
        train(method(), Colors(), RECIPE, tmp_path / "run", progress=press)
    with pytest.raises(RunError, match=re.escape(str(tmp_path / "run"))):
        load_run(tmp_path / "run", tiny_clip(dtype=torch.float32))
    with pytest.raises(RunError, match=re.escape(str(tmp_path / "run"))):
        train(method(), Colors(), RECIPE, tmp_path / "run")
    train(method(), Colors(), RECIPE, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert signal.getsignal(signal.SIGINT) is before


def test_resume_of_a_finished_run_trains_no_more(tmp_path: Path) -> None:
    first = method()
    train(first, Colors(), RECIPE, tmp_path / "run")
    again = method(seed=3)
    steps = []
    train(again, Colors(), RECIPE, tmp_path / "run", resume=True, progress=lambda *a: steps.append(a))
    assert steps == []
    assert torch.equal(first.tokens, again.tokens)


def test_resume_with_other_settings_is_refused(tmp_path: Path) -> None:
    train(method(), Colors(), RECIPE, tmp_path / "run")
    with pytest.raises(RunError, match="epochs, batch, lr"):
        train(method(), Colors(), Recipe(epochs=5), tmp_path / "run", resume=True)
    with pytest.raises(RunError, match="training images"):
        train(method(), Colors(each=3), RECIPE, tmp_path / "run", resume=True)
    with pytest.raises(RunError, match="beta"):
        train(method(beta=0.5), Colors(), RECIPE, tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=re.escape(str(tmp_path / "run"))):
        train(method(), Colors(), RECIPE, tmp_path / "run")


def test_a_second_process_is_told(tmp_path: Path) -> None:
    inside, leave, errors = threading.Event(), threading.Event(), []

    def stop() -> bool:
        inside.set()
        leave.wait(20)
        return True

    def first() -> None:
        try:
            train(method(), Colors(), RECIPE, tmp_path / "run", stop=stop)
        except Paused as pause:
            errors.append(pause)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(RunError, match=re.escape(str(tmp_path / "run"))):
        train(method(), Colors(), RECIPE, tmp_path / "run", resume=True)
    leave.set()
    thread.join()
    assert len(errors) == 1


class Breaks(DeAR):
    """Its regularizer turns to NaN in the seventh step."""

    calls = 0

    def loss_from_frozen(self, frozen, labels, domains=None):
        loss = super().loss_from_frozen(frozen, labels, domains)
        self.calls += 1
        factor = float("nan") if self.calls >= 7 else 1.0
        parts = {**loss.parts, "reg_text": loss.parts["reg_text"] * factor}
        return Loss(loss.total * factor, parts)


def test_nan_stops_with_step_and_part_and_writes_nothing_broken(tmp_path: Path) -> None:
    model = Breaks(tiny_clip(dtype=torch.float32), CLASSES, roles=mixed_roles(), ids=token_ids())
    with pytest.raises(RunError, match=r"reg_text .*step 7"):
        train(model, Colors(), RECIPE, tmp_path / "run", save_every=1)
    assert not (tmp_path / "run/adapter.safetensors").exists()
    state = safetensors.torch.load((tmp_path / "run/resume.safetensors").read_bytes())
    assert all(torch.isfinite(t).all() for t in state.values() if t.is_floating_point())


def test_the_learning_rate_warms_up_and_falls_to_almost_nothing() -> None:
    rates = [Recipe().rate(step, 7) for step in range(70)]
    assert rates[:7] == [1e-5] * 7
    assert rates[7] == 1e-3
    assert all(a > b for a, b in itertools.pairwise(rates[7:]))
    assert rates[-1] < 2e-6
    by_epoch = [Recipe(cosine_by="epoch").rate(step, 7) for step in range(70)]
    assert len(set(by_epoch)) == 10
    assert Recipe(epochs=1).rate(0, 7) == 1e-3  # too short for a warm-up


def test_every_image_is_seen_once_an_epoch_in_a_new_order() -> None:
    batches: list[list[int]] = []

    class Watch(ZeroShot):
        def build(self, generator):
            self.w = self.learn(torch.zeros(1))

        def loss_from_frozen(self, frozen, labels, domains=None):
            batches.append(labels.tolist())
            return Loss((self.w * frozen.x.mean()).sum(), {})

    model = Watch(tiny_clip(dtype=torch.float32), CLASSES, ids=token_ids())
    train(model, Colors(), Recipe(epochs=2, batch=5))
    assert [len(batch) for batch in batches] == [5, 5, 2, 5, 5, 2]
    first, second = (list(itertools.chain(*part)) for part in (batches[:3], batches[3:]))
    assert sorted(first) == sorted(second) == [0] * 4 + [1] * 4 + [2] * 4
    assert first != second


def test_a_run_with_options_that_were_removed_loads_with_their_defaults(tmp_path: Path) -> None:
    train(method(), Colors(), RECIPE, tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    config = json.loads(file.read_text())
    clip = tiny_clip(dtype=torch.float32)
    config["options"] |= {"projection": "copy", "fusion_loss": "log", "early_beta": 1.0}
    file.write_text(json.dumps(config))
    assert load_run(tmp_path / "run", clip).name == "dear"
    config["options"]["projection"] = "random"
    file.write_text(json.dumps(config))
    with pytest.raises(RunError, match="projection"):
        load_run(tmp_path / "run", clip)


def test_loading_refuses_what_does_not_belong(tmp_path: Path) -> None:
    train(method(), Colors(), RECIPE, tmp_path / "run")
    with pytest.raises(RunError, match=r"tiny .*sha256"):
        load_run(tmp_path / "run", tiny_clip(seed=8, dtype=torch.float32))
    load_run(tmp_path / "run", tiny_clip(seed=8, dtype=torch.float32), allow_other=True)
    with pytest.raises(RunError, match=r"config\.json"):
        load_run(tmp_path, tiny_clip(dtype=torch.float32))
    config = json.loads((tmp_path / "run/config.json").read_text())
    wrong = [("schema", 99), ("classes", "red"), ("classes", [1, 2, 3]), ("format", "x"), ("method", "deer")]
    wrong += [("options", {"gamma": 1}), ("options", {"beta": "x"}), ("options", {"text_tokens": 10**9})]
    wrong += [("ids", [[1], [2, 3], [4]]), ("ids", [[10**9]] * 3), ("ids", [[-1]] * 3), ("ids", ["a"] * 3)]
    for key, value in wrong:
        (tmp_path / "run/config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(DearError):
            load_run(tmp_path / "run", tiny_clip(dtype=torch.float32))


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(Paused):
        train(method(), Colors(), RECIPE, tmp_path / "run", stop=lambda: True)
    path = tmp_path / "run/resume.safetensors"
    data = path.read_bytes()
    state = safetensors.torch.load(data)
    for broken in (
        data[: len(data) // 2],
        safetensors.torch.save({}, {"step": "1", "parts": "loss"}),
        safetensors.torch.save(state, {"parts": "loss"}),
        safetensors.torch.save(state, {"step": "one", "parts": "loss"}),
        safetensors.torch.save({**state, "optimizer.x.y": torch.zeros(1)}, {"step": "1", "parts": "loss"}),
    ):
        path.write_bytes(broken)
        with pytest.raises(DearError, match=r"resume\.safetensors"):
            train(method(), Colors(), RECIPE, tmp_path / "run", resume=True)
