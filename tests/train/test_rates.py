"""Learning rates of single tensors: what the optimizer gets, and what a resumed run remembers of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip, token_ids

from dear.methods import DeAR
from dear.runs.recipe import Recipe
from dear.train.run import Paused, train


def strong() -> DeAR:
    clip = tiny_clip(dtype=torch.float32)
    options = DeAR.preset("strong").options
    return DeAR(clip, Colors().classes, roles=mixed_roles(), ids=token_ids(), **options)


def test_a_tensor_moves_by_its_multiple_of_the_rate() -> None:
    """The first step of AdamW moves every entry with a gradient by the learning rate, whatever its size."""
    recipe = Recipe(epochs=1, batch=12, lr=1e-3, weight_decay=0.0, precision="float32")
    model = strong()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, Colors(), recipe)
    rates = model.config
    assert rates.token_rate != rates.text_rate
    for name, multiple in (("tokens", rates.token_rate), ("text_tokens", rates.text_rate)):
        moved = (model.get_parameter(name).detach() - before[name]).abs().max()
        assert float(moved) == pytest.approx(multiple * 1e-3, rel=1e-3), name


def test_a_paused_run_with_several_rates_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    recipe = Recipe(epochs=4, batch=5, precision="float32")
    uninterrupted, resumed = strong(), strong()
    train(uninterrupted, Colors(), recipe, tmp_path / "whole")
    pause = iter([False] * 4 + [True])
    with pytest.raises(Paused):
        train(strong(), Colors(), recipe, tmp_path / "run", stop=lambda: next(pause))
    train(resumed, Colors(), recipe, tmp_path / "run", resume=True)
    for name, tensor in uninterrupted.adapter_state().items():
        assert torch.equal(tensor, resumed.adapter_state()[name]), name
