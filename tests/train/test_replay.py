"""Training on a GPU: a replayed step trains as an ordinary one does (skipped where there is no GPU)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip, token_ids

from dear.methods import DeAR
from dear.train import Recipe, evaluate, load_run, train

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def model() -> DeAR:
    clip = tiny_clip(dtype=torch.float32).to("cuda")
    return DeAR(clip, ("red", "green", "blue"), roles=mixed_roles(), ids=token_ids())


@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_replayed_training_is_the_same_training(precision: str) -> None:
    recipe = Recipe(epochs=20, batch=5, lr=1e-2, precision=precision)
    states = []
    for replay in (True, False):
        method = model()
        lines = train(method, Colors(), Recipe(**{**recipe.__dict__, "replay": replay})).lines
        assert lines[-1]["loss"] < lines[0]["loss"]
        states.append(method.adapter_state())
    # In 16 bits a replayed run rounds elsewhere (the frozen part is computed for several steps at once), and
    # AdamW turns small differences of small gradients into whole steps: learned tensors are near, not equal.
    exact = precision == "float32"
    for name, tensor in states[0].items():
        gap = float((tensor - states[1][name]).norm() / tensor.norm())
        assert gap < (1e-3 if exact else 0.2), (name, gap)
    assert evaluate(method, Colors()).accuracy["fused"] > 0.5


@needs_gpu
def test_trained_on_a_gpu_loads_on_the_cpu(tmp_path: Path) -> None:
    method = model()
    train(method, Colors(), Recipe(epochs=5, batch=4, deterministic=True), tmp_path / "run")
    loaded = load_run(tmp_path / "run", tiny_clip(dtype=torch.float32))
    pixels = torch.randn(2, 3, 24, 24)
    torch.testing.assert_close(loaded.logits(pixels), method.logits(pixels).cpu(), rtol=1e-3, atol=1e-3)
