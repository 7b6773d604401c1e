"""One table, every registered method: what a method promises, whatever it does inside.

A method with needs of its own gets a line in `OPTIONS`; nothing else here names one.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip

from dear.clip import Clip
from dear.errors import DearError, UsageError
from dear.methods import METHODS, Method, ZeroShot, build_method, list_methods
from dear.methods.base import in_precision
from dear.runs.folder import load_run
from dear.runs.recipe import Recipe
from dear.train.feed import Feed
from dear.train.run import train

OPTIONS: dict[str, dict[str, object]] = {}
"""Options that make a method small or quick enough for a tiny model."""

CLOSED = ("zeroshot", "linear-probe", "tip-adapter", "lp-plus-plus", "proker")
TRAINED = [name for name in METHODS if name not in CLOSED]
"""Methods that learn by steps."""

NAMES = ("red", "green", "blue")
NOVEL = ("crimson apple", "tall tree")


def build(name: str, clip: Clip | None = None, classes: tuple[str, ...] = NAMES, seed: int = 1) -> Method:
    clip = clip or tiny_clip(dtype=torch.float32)
    return build_method(name, clip, classes, roles=mixed_roles(), seed=seed, **OPTIONS.get(name, {}))


def task() -> Colors:
    return Colors(domains=2)


def fitted(name: str, clip: Clip | None = None, epochs: int = 2) -> Method:
    model = build(name, clip)
    train(model, task(), Recipe.of(model, epochs=epochs, batch=6, lr=5e-3, optimizer="adamw"))
    return model


def pixels(count: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("name", METHODS)
class TestEveryMethod:
    def test_describes_itself(self, name: str) -> None:
        kind = METHODS[name]
        assert kind.name == name
        assert kind.title
        assert kind.__doc__
        assert dataclasses.is_dataclass(kind.Config)
        config = build(name).config
        assert kind.Config(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
        with pytest.raises(UsageError, match="no option 'nonsense'"):
            build_method(name, tiny_clip(dtype=torch.float32), NAMES, roles=mixed_roles(), nonsense=1)

    def test_forward(self, name: str) -> None:
        model = fitted(name, epochs=0)
        found = model.all_logits(pixels())
        assert tuple(found) == model.modes
        for mode, logits in found.items():
            assert logits.shape == (3, 3)
            assert logits.dtype == torch.float32
            assert torch.isfinite(logits).all()
            assert torch.equal(model.logits(pixels(), mode), logits)
        assert torch.equal(model.logits(pixels()), found[model.modes[0]])
        with pytest.raises(UsageError, match="no mode"):
            model.logits(pixels(), "nonsense")

    def test_one_image_counts_for_itself(self, name: str) -> None:
        """Answers do not depend on the batch an image came in."""
        model = fitted(name)
        whole = model.logits(pixels())
        alone = torch.cat([model.logits(pixels()[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-4)

    def test_only_its_own_tensors_learn(self, name: str) -> None:
        clip = tiny_clip(dtype=torch.float32)
        before = copy.deepcopy(clip.state_dict())
        frozen = ZeroShot(clip, NAMES).logits(pixels())
        model = fitted(name, clip)
        after = clip.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert all(p.grad is None and not p.requires_grad for p in clip.parameters())
        assert not {id(p) for p in model.parameters()} & {id(p) for p in clip.parameters()}
        assert torch.equal(ZeroShot(model.clip, NAMES).logits(pixels()), frozen)  # disabled = frozen CLIP
        assert model.clip is clip

    def test_saved_and_loaded_gives_the_same_logits(self, name: str, tmp_path: Path) -> None:
        model = build(name)
        train(model, task(), Recipe.of(model, epochs=1, batch=6), tmp_path / "run")
        loaded = load_run(tmp_path / "run", tiny_clip(dtype=torch.float32))
        assert type(loaded) is type(model)
        for mode, logits in model.all_logits(pixels()).items():
            assert torch.equal(loaded.logits(pixels(), mode), logits)

    def test_other_classes(self, name: str) -> None:
        model = fitted(name)
        same = model.with_classes(NAMES)
        assert torch.equal(same.logits(pixels()), model.logits(pixels()))
        if not model.open_classes:
            with pytest.raises(UsageError, match="learns its classes"):
                model.with_classes(NOVEL)
            return
        other = model.with_classes(NOVEL)
        assert other.logits(pixels()).shape == (3, 2)
        assert torch.isfinite(other.logits(pixels())).all()
        assert model.logits(pixels()).shape == (3, 3)  # the first is as it was

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision_stays_finite_and_near(self, name: str, dtype: torch.dtype) -> None:
        model = fitted(name)
        exact = model.logits(pixels())
        precision = str(dtype).removeprefix("torch.")
        bound = in_precision(model, precision)
        assert bound.clip.visual.dtype == dtype
        rough = bound.logits(pixels())
        loss = bound.loss(pixels(), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0]))
        if model.trainable_parameters:
            loss.total.backward()
        assert rough.dtype == torch.float32
        assert (rough - exact).abs().max() < 0.5
        assert torch.isfinite(loss.total)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)

    def test_backbone_loaded_in_low_precision(self, name: str) -> None:
        model = build(name, tiny_clip(dtype=torch.bfloat16))
        train(model, task(), Recipe.of(model, epochs=1, batch=6))
        logits = model.logits(pixels())
        assert logits.dtype == torch.float32
        assert torch.isfinite(logits).all()
        assert all(p.dtype == torch.float32 for p in model.parameters())

    def test_a_state_that_does_not_fit_is_refused(self, name: str) -> None:
        model = fitted(name)
        if model.adapter_state():
            state = model.adapter_state()
            state.pop(next(iter(state)))
            with pytest.raises(DearError, match="missing"):
                model.load_adapter_state(state)
        with pytest.raises(DearError, match="not part of the method"):
            model.load_adapter_state({**model.adapter_state(), "stray": torch.zeros(1)})

    def test_merged_equals_unmerged(self, name: str) -> None:
        model = fitted(name)
        if not model.mergeable:
            with pytest.raises(UsageError, match="cannot be folded"):
                model.merge()
            return
        merged = model.merge()
        plain = ZeroShot(merged, NAMES, template=model.template).logits(pixels())
        torch.testing.assert_close(plain, model.logits(pixels()), rtol=1e-4, atol=1e-4)
        shape = [(n, tuple(p.shape)) for n, p in merged.named_parameters()]
        assert shape == [(n, tuple(p.shape)) for n, p in model.clip.named_parameters()]
        assert len(list(merged.modules())) == len(list(model.clip.modules()))

    def test_same_seed_same_result(self, name: str) -> None:
        first, second = fitted(name).adapter_state(), fitted(name).adapter_state()
        assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", TRAINED)
def test_loss_falls_on_a_small_task(name: str) -> None:
    """The method's own loss on the training images themselves, before and after."""
    model, images = build(name), task()
    recipe = Recipe.of(model, epochs=0, batch=12)
    train(model, images, recipe)  # cache models prepare
    batch = next(Feed(images, model.clip, recipe).walk())

    def loss() -> float:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # some losses draw views of their own
            return model.loss(*batch).total.item()

    before = loss()
    views = {"scale": (1.0, 1.0), "flip": 0.0}
    train(model, images, Recipe.of(model, epochs=20, batch=12, lr=5e-3, optimizer="adamw", **views))
    assert loss() < before - 0.002


def test_the_list_has_each_once() -> None:
    assert list_methods() == list(METHODS)
    assert len(set(METHODS.values())) == len(METHODS)
