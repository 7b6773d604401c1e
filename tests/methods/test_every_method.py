"""One table, every registered method: what a method promises, whatever it does inside.

A method with needs of its own gets a line in `tiny.SMALL`, `NEUTRAL` or `LATER`; nothing else here names one.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from every_method import NAMES, NOVEL, TASK, build, pixels
from tiny import LEARNING, images, tiny_clip

from dear.clip import Clip
from dear.errors import DearError, RunError, UsageError
from dear.methods import METHODS, Batch, Method, ZeroShot
from dear.runs.folder import load_run
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.train.run import Paused, train

LABELS, DOMAINS = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 0, 1, 1, 2, 2])
# Options under which a method that has learned nothing yet is the frozen CLIP, or nothing else is possible.
NEUTRAL = {
    "zeroshot": {},
    "linear-probe": {"start": "text", "C": 1e-12},
    "coop": {},
    "kgcoop": {},
    "prograd": {"context": 4, "words": "a photo of a"},
    "vpt": {"tokens": 0},
    "clip-adapter": {"ratio": 0.0},
    "tip-adapter": {"alpha": 0.0},
    "tip-adapter-f": {"alpha": 0.0},
    "clip-lora": {},
    "purify": {},
}
LATER = {"two-stage": ("classifier",)}  # learned tensors that begin to learn in a later stage


def recipe(name: str) -> Recipe:
    return Recipe.of(METHODS[name], epochs=3, batch=5, lr=1e-2)


@dataclasses.dataclass
class Trained:
    """One training of a method, which all tests read and none changes; `copy` may be changed."""

    method: Method
    clip: Clip
    before: dict[str, torch.Tensor]
    run: TemporaryDirectory[str]

    def copy(self) -> Method:
        return copy.deepcopy(self.method)


@cache
def trained(name: str) -> Trained:
    clip = tiny_clip(dtype=torch.float32)
    before, method, folder = copy.deepcopy(clip.state_dict()), build(name, clip), TemporaryDirectory()
    train(method, TASK, recipe(name), Path(folder.name) / "run")
    return Trained(method, clip, before, folder)


def exact(name: str, **options: object) -> Method:
    """In float64; caches are filled, nothing has been learned."""
    method = build(name, tiny_clip(), **options)
    method.prepare(lambda augment: iter([Batch(images(6), LABELS, DOMAINS)]))
    return method


def shake(method: Method) -> Method:
    """Move every learned tensor away from where it is."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)
    return method


def test_the_names_promised_are_there() -> None:
    promised = (
        "zeroshot linear-probe coop cocoop vpt maple promptsrc prograd kgcoop tcp clip-adapter tip-adapter "
        "tip-adapter-f clip-lora rpo mmrl mmrlpp dear purify skip-tuning two-stage prolip lp-plus-plus proker"
    )
    assert promised.split() == list(METHODS)[: len(promised.split())]  # others may follow
    assert len(set(METHODS.values())) == len(METHODS)


@pytest.mark.parametrize("name", METHODS)
class TestEveryMethod:
    def test_describes_itself(self, name: str) -> None:
        kind, method = METHODS[name], build(name)
        assert kind.name == name
        assert kind.title
        assert kind.__doc__
        assert dataclasses.is_dataclass(kind.Config)
        assert kind.Config(**json.loads(json.dumps(dataclasses.asdict(method.config)))) == method.config
        with pytest.raises(UsageError, match="nonsense"):
            build(name, method.clip, nonsense=1)

    def test_answers_in_every_mode(self, name: str) -> None:
        method = trained(name).method
        found = method.all_logits(pixels())
        assert tuple(found) == method.modes
        for mode, logits in found.items():
            assert logits.shape == (3, 3)
            assert logits.dtype == torch.float32
            assert torch.isfinite(logits).all()
            assert torch.equal(method.logits(pixels(), mode), logits)
        assert torch.equal(method.logits(pixels()), found[method.modes[0]])
        with pytest.raises(UsageError, match="nonsense"):
            method.logits(pixels(), "nonsense")

    def test_an_answer_does_not_depend_on_the_batch(self, name: str) -> None:
        method = trained(name).method
        alone = torch.cat([method.logits(pixels()[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(method.logits(pixels()), alone, rtol=1e-4, atol=1e-4)

    def test_only_its_own_tensors_learn(self, name: str) -> None:
        method, clip, before = trained(name).method, trained(name).clip, trained(name).before
        assert method.clip is clip
        assert all(torch.equal(tensor, before[key]) for key, tensor in clip.state_dict().items())
        assert all(p.grad is None and not p.requires_grad for p in clip.parameters())
        held = {p.data_ptr() for p in clip.parameters()}
        assert not held & {t.data_ptr() for t in method.state_dict().values() if t.numel()}
        assert method.trainable_parameters == sum(p.numel() for p in method.parameters())
        assert (method.learned_parameters > 0) == (name != "zeroshot")
        untouched = ZeroShot(tiny_clip(dtype=torch.float32), NAMES).logits(pixels())
        assert torch.equal(ZeroShot(clip, NAMES).logits(pixels()), untouched)
        torch.testing.assert_close(Model(method).zero_shot().forward(pixels())["default"], untouched)

    def test_saved_and_loaded_gives_the_same_logits(self, name: str) -> None:
        method = trained(name).method
        loaded = load_run(Path(trained(name).run.name) / "run", tiny_clip(dtype=torch.float32))
        assert type(loaded) is type(method)
        for mode, logits in method.all_logits(pixels()).items():
            assert torch.equal(loaded.logits(pixels(), mode), logits)

    def test_a_paused_run_continues_to_the_same_bits(self, name: str, tmp_path: Path) -> None:
        """Sums over epochs, gate histories, caches and dropout are part of what a pause keeps."""
        stops: list[int] = []
        if name in LEARNING:
            cut = build(name), TASK, recipe(name), tmp_path / "run"
            with pytest.raises(Paused):
                train(*cut, stop=lambda: stops.append(1) or len(stops) == 5)
        again = build(name)
        train(again, TASK, recipe(name), tmp_path / "run", resume=name in LEARNING)
        states = trained(name).method.adapter_state(), again.adapter_state()
        assert set(states[0]) == set(states[1])
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])

    def test_new_classes_work_or_are_refused(self, name: str) -> None:
        method = trained(name).method
        logits = method.logits(pixels())
        assert torch.equal(method.with_classes(NAMES).logits(pixels()), logits)
        if not method.open_classes:
            with pytest.raises(UsageError, match="classes"):
                method.with_classes(NOVEL)
            return
        other = method.with_classes(NOVEL)
        assert other.logits(pixels()).shape == (3, 4)
        assert torch.isfinite(other.logits(pixels())).all()
        near = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(other.with_classes(NAMES).logits(pixels()), logits, **near)
        reordered = method.with_classes(NAMES[::-1])
        torch.testing.assert_close(reordered.logits(pixels()).flip(1), logits, **near)
        assert torch.equal(method.logits(pixels()), logits)  # the first is as it was

    @pytest.mark.parametrize("precision", ["bfloat16", "float16"])
    def test_16_bits_stay_finite_and_near(self, name: str, precision: str) -> None:
        method = trained(name).copy()
        bound = method.in_precision(precision)
        assert bound.clip.visual.dtype == getattr(torch, precision)
        rough = bound.logits(pixels())
        loss = bound.loss(pixels(), LABELS[:3], DOMAINS[:3])
        if method.trainable_parameters:
            loss.total.backward()
        assert rough.dtype == torch.float32
        assert (rough - method.logits(pixels())).abs().max() < 0.5
        assert torch.isfinite(loss.total)
        assert all(torch.isfinite(p.grad).all() for p in method.parameters() if p.grad is not None)

    def test_a_backbone_loaded_in_16_bits_is_trained_on(self, name: str) -> None:
        method = build(name, tiny_clip(dtype=torch.bfloat16))
        train(method, TASK, Recipe.of(method, epochs=1, batch=6))
        logits = method.logits(pixels())
        assert logits.dtype == torch.float32
        assert torch.isfinite(logits).all()
        assert all(p.dtype == torch.float32 for p in method.parameters())

    @pytest.mark.skipif(
        torch.__version__.startswith("2.6."), reason="autocast keeps casts made without gradients"
    )
    @pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
    def test_autocast_stays_finite(self, name: str, precision: torch.dtype) -> None:
        method = trained(name).copy()
        with torch.autocast("cpu", dtype=precision):
            assert torch.isfinite(method.logits(pixels())).all()
        with torch.autocast(
            "cpu", dtype=precision
        ):  # PyTorch 2.10 reuses weights that were cast without gradient
            loss = method.loss(pixels(6), LABELS, DOMAINS)
            assert torch.isfinite(loss.total)
        if name in LEARNING:
            method.backward(loss, lambda x: x)
            assert all(torch.isfinite(p.grad).all() for p in method.parameters() if p.grad is not None)

    def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(self, name: str) -> None:
        method = trained(name).copy()
        before, logits = method.adapter_state(), method.logits(pixels())
        if before:
            missing = next(iter(before))
            with pytest.raises(DearError, match=missing):
                method.load_adapter_state({key: t for key, t in before.items() if key != missing})
        state = {key: tensor.reshape(-1)[:0] for key, tensor in before.items()} | {"stray": torch.zeros(1)}
        with pytest.raises(RunError, match="stray"):
            method.load_adapter_state(state)
        assert all(torch.equal(tensor, before[key]) for key, tensor in method.adapter_state().items())
        assert torch.equal(method.logits(pixels()), logits)

    def test_merged_equals_unmerged(self, name: str) -> None:
        method = trained(name).method
        if not method.mergeable:
            with pytest.raises(UsageError, match=f"'{name}'"):
                method.merge()
            return
        merged = method.merge()
        plain = ZeroShot(merged, NAMES, template=method.template).logits(pixels())
        torch.testing.assert_close(plain, method.logits(pixels()), rtol=1e-4, atol=1e-4)
        shapes = [[(n, tuple(p.shape)) for n, p in clip.named_parameters()] for clip in (merged, method.clip)]
        assert shapes[0] == shapes[1]
        assert len(list(merged.modules())) == len(list(method.clip.modules()))

    def test_the_written_out_attention_gives_the_same(self, name: str) -> None:
        method = shake(exact(name))
        fused = method.logits(images(3))
        method.clip.use_fused(False)
        method._cache.clear()
        torch.testing.assert_close(method.logits(images(3)), fused, rtol=1e-9, atol=1e-9)

    def test_the_frozen_stage_is_of_each_image_and_knows_nothing_learned(self, name: str) -> None:
        """Which is what allows it to be computed ahead of time in groups, and kept."""
        method = trained(name).copy()
        before = method.frozen_stage(pixels())
        after = shake(method).frozen_stage(pixels())
        alone = [method.frozen_stage(pixels()[i : i + 1]) for i in range(3)]
        for place, (one, other) in enumerate(zip(before, after, strict=True)):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
            if one is None:
                continue
            assert one.shape[0] == 3
            assert not one.requires_grad
            parts = torch.cat([stage[place] for stage in alone])
            torch.testing.assert_close(one, parts, rtol=1e-4, atol=1e-5)

    def test_both_stages_in_sequence_are_the_logits_and_the_loss(self, name: str) -> None:
        method = trained(name).copy()
        with torch.no_grad():
            found = method.logits_from_frozen(method.frozen_stage(pixels()))
            # the class token of a frozen layer is rounded differently with and without the patches next to it
            exact = method.class_token_at is None
            for mode, logits in method.all_logits(pixels()).items():
                close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
                torch.testing.assert_close(found[mode], logits, **close)
        if not method.trainable_parameters:
            return
        results = []
        for staged in (True, False):
            method.zero_grad()
            with torch.random.fork_rng():
                torch.manual_seed(0)  # dropout
                if staged:
                    loss = method.loss_from_frozen(method.frozen_stage(pixels()), LABELS[:3], DOMAINS[:3])
                else:
                    loss = method.loss(pixels(), LABELS[:3], DOMAINS[:3])
            method.backward(loss, lambda x: x)
            grads = [p.grad.clone() for p in method.parameters() if p.grad is not None]
            results.append([loss.total.detach(), *grads])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_a_bound_method_shares_what_is_learned_and_nothing_else(self, name: str) -> None:
        method = trained(name).copy()
        logits, clip, prompts = method.logits(pixels()), method.clip, method.prompts
        frozen, prefix = prompts.frozen, dict(prompts._prefix)
        other = method.bind(clip.cast(torch.bfloat16))
        assert other.prompts is not prompts
        assert 0 < (other.logits(pixels()) - logits).abs().max() < 1.0
        assert method.clip is clip
        assert method.prompts is prompts
        assert prompts.frozen is frozen
        assert all(prompts._prefix[layer] is tensor for layer, tensor in prefix.items())
        assert torch.equal(method.logits(pixels()), logits)
        shake(other)
        assert [id(p) for p in method.parameters()] == [id(p) for p in other.parameters()]
        assert [id(b) for b in method.buffers()] == [id(b) for b in other.buffers()]
        if method.trainable_parameters:
            assert not torch.equal(method.logits(pixels()), logits)


@pytest.mark.parametrize("name", LEARNING)
def test_loss_falls_and_every_tensor_learns(name: str) -> None:
    """A few steps on one batch, in float64."""
    method = exact(name)
    start = {key: p.detach().clone() for key, p in method.named_parameters()}
    optimizer, losses = torch.optim.Adam(method.parameters(), 1e-2), []
    for _ in range(12):
        torch.manual_seed(1)  # the same dropout every time: a fixed function is minimized
        optimizer.zero_grad()
        loss = method.loss(images(6), LABELS, DOMAINS)
        method.backward(loss, lambda x: x)
        optimizer.step()
        losses.append(float(loss.total.detach()))
    assert losses[-1] < losses[0], losses
    later = LATER.get(name, ())
    still = [key for key, p in method.named_parameters() if torch.equal(p, start[key]) and key not in later]
    assert not still, "a tensor did not learn"


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_method_that_has_learned_nothing_is_the_frozen_clip(name: str) -> None:
    method = exact(name, **NEUTRAL[name])
    frozen = ZeroShot(method.clip, method.classes).logits(images(3))
    torch.testing.assert_close(method.logits(images(3)), frozen, rtol=1e-10, atol=1e-10)
