"""What the library finds out about a method instead of being told: new classes, quickness, merging."""

from __future__ import annotations

import pytest
import torch
from tiny import Colors, images, mixed_roles, tiny_clip

from dear.clip.tower import Tower
from dear.errors import RunError, UsageError
from dear.methods import METHODS, build_method, list_methods
from dear.methods.base import Method
from dear.runs.recipe import Recipe
from dear.train.run import train

CLASSES = ("red", "green", "blue")


def trained(name: str) -> Method:
    method = build_method(name, tiny_clip(dtype=torch.float32), CLASSES, roles=mixed_roles())
    train(method, Colors(each=2), Recipe.of(method, epochs=1, batch=6))
    return method


@pytest.mark.parametrize("name", list_methods())
def test_only_a_method_whose_tensors_fit_any_classes_names_new_ones(name: str) -> None:
    method = trained(name)
    fresh = build_method(name, method.clip, ("fox", "owl"), roles=mixed_roles(), trained=CLASSES)
    try:
        fresh.load_adapter_state(method.adapter_state())
        fits = True
    except RunError:
        fits = False
    if name in ("tip-adapter", "tip-adapter-f"):  # its labels number the classes, which no shape says
        fits = False
    assert method.open_classes == fits
    if fits:
        assert method.with_classes(("fox", "owl")).logits(images(2, dtype=torch.float32)).shape == (2, 2)
    else:
        for other in (("fox", "owl"), ("fox", "owl", "cow")):
            with pytest.raises(UsageError, match=name):
                method.with_classes(other)


@pytest.mark.parametrize("name", list_methods())
def test_a_quick_method_runs_no_tower_in_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = trained(name)
    if not method.trainable_parameters:
        assert method.quick
        return
    stage = method.frozen_stage(images(3, dtype=torch.float32))
    method.prompts.frozen  # noqa: B018 (computed once)
    runs: list[Tower] = []
    run = Tower.run
    monkeypatch.setattr(Tower, "run", lambda self, *a, **k: (runs.append(self), run(self, *a, **k))[1])
    domains = torch.tensor([0, 1, 0]) if name == "purify" else None
    method.loss_from_frozen(stage, torch.tensor([0, 1, 2]), domains)
    assert method.quick == (not runs)


def test_only_methods_that_write_merge_are_merged() -> None:
    for kind in METHODS.values():
        assert kind.mergeable == ("merge" in kind.__dict__)
