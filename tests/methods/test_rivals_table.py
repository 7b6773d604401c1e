"""Every method again, in float64: disabled, neutral, reordered, interrupted; and under autocast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import Colors, images, mixed_roles, tiny_clip

from dear._io.files import read_safetensors, write_safetensors
from dear.errors import UsageError
from dear.methods import METHODS, Batch, Method, ZeroShot, build_method
from dear.runs.recipe import Recipe
from dear.train.run import Paused, train

NAMES = ("red cat", "dog", "very old newt")
NOVEL = ("purple tree", "house", "sea", "lamp")
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
DOMAINS = torch.tensor([0, 0, 1, 1, 2, 2])
SMALL = {"mmrl": {"width": 16}, "mmrlpp": {"width": 16}, "rpo": {"prompts": 5}, "promptsrc": {}}
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
EVERY = list(METHODS)
CLOSED = ("zeroshot", "linear-probe", "tip-adapter", "lp-plus-plus", "proker")  # nothing is learned by steps
LEARNING = [name for name in EVERY if name not in CLOSED]


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 1, **options) -> Method:
    options = {**SMALL.get(name, {}), **options}
    clip = tiny_clip(dtype=dtype)
    method = build_method(name, clip, NAMES, roles=mixed_roles(), seed=seed, **options)
    pixels = images(6, dtype=dtype)
    method.prepare(lambda augment: iter([Batch(pixels, LABELS, DOMAINS)]))
    return method


def scatter(method: Method, size: float = 0.1) -> Method:
    """Move every learned tensor away from its start."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device) * size)
    return method


def frozen(method: Method, pixels: torch.Tensor) -> torch.Tensor:
    return ZeroShot(method.clip, method.classes).logits(pixels)


def steps(method: Method, count: int, lr: float = 1e-2, pixels: torch.Tensor | None = None) -> list[float]:
    """The losses of a few steps on one batch."""
    pixels = images(6, dtype=method.clip.dtype) if pixels is None else pixels
    optimizer = torch.optim.Adam(method.parameters(), lr)
    losses = []
    for _ in range(count):
        torch.manual_seed(0)  # the same dropout every time: a fixed function is minimized
        optimizer.zero_grad()
        loss = method.loss(pixels, LABELS, DOMAINS)
        method.backward(loss, lambda x: x)
        optimizer.step()
        losses.append(float(loss.total.detach()))
    return losses


def test_the_names_promised_are_there() -> None:
    promised = (
        "zeroshot linear-probe coop cocoop vpt maple promptsrc prograd kgcoop tcp clip-adapter tip-adapter "
        "tip-adapter-f clip-lora rpo mmrl mmrlpp dear purify skip-tuning two-stage prolip lp-plus-plus proker"
    )
    assert promised.split() == EVERY[: len(promised.split())]  # others may follow
    assert all(kind.name == name and kind.title and kind.__doc__ for name, kind in METHODS.items())


@pytest.mark.parametrize("name", LEARNING)
def test_loss_falls_and_only_its_own_tensors_learn(name: str) -> None:
    method = build(name)
    backbone = {key: tensor.clone() for key, tensor in method.clip.state_dict().items()}
    start = {key: p.detach().clone() for key, p in method.named_parameters()}
    losses = steps(method, 12)
    assert losses[-1] < losses[0], losses
    later = LATER.get(name, ())
    still = [key for key, p in method.named_parameters() if torch.equal(p, start[key]) and key not in later]
    assert not still, "a tensor did not learn"
    assert all(torch.equal(tensor, backbone[key]) for key, tensor in method.clip.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in method.clip.parameters())
    held = {p.data_ptr() for p in method.clip.parameters()}
    assert not held & {t.data_ptr() for t in method.state_dict().values() if t.numel()}
    assert method.trainable_parameters == sum(p.numel() for p in method.parameters())


@pytest.mark.parametrize("name", EVERY)
def test_save_and_load_give_the_same_logits(name: str, tmp_path: Path) -> None:
    method, pixels = scatter(build(name)), images(3)
    method.after_epoch(1, 2)  # some methods keep more while they train
    for moment in ("while training", "after"):
        if moment == "after":
            method.after_epoch(2, 2)
            method.finish()
        path = tmp_path / f"{moment}.safetensors"
        write_safetensors(path, method.adapter_state(), {"method": name})
        loaded = build_method(name, method.clip, NAMES, roles=mixed_roles(), seed=7, config=method.config)
        loaded.load_adapter_state(read_safetensors(path, "adapter")[0])
        for mode in method.modes:
            assert torch.equal(loaded.logits(pixels, mode), method.logits(pixels, mode))
    same = method.with_classes(NAMES)
    assert torch.equal(same.logits(pixels), method.logits(pixels))


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_method_that_has_learned_nothing_is_the_frozen_clip(name: str) -> None:
    method, pixels = build(name, **NEUTRAL[name]), images(3)
    torch.testing.assert_close(method.logits(pixels), frozen(method, pixels), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", EVERY)
def test_novel_classes_work_or_are_refused(name: str) -> None:
    method, pixels = scatter(build(name)), images(3)
    if not method.open_classes:
        with pytest.raises(UsageError, match="learns its classes"):
            method.with_classes(NOVEL)
        return
    other = method.with_classes(NOVEL)
    assert other.logits(pixels).shape == (3, 4)
    back = other.with_classes(NAMES)
    torch.testing.assert_close(back.logits(pixels), method.logits(pixels))
    reordered = method.with_classes(NAMES[::-1])
    torch.testing.assert_close(reordered.logits(pixels).flip(1), method.logits(pixels))


@pytest.mark.parametrize("name", EVERY)
def test_the_written_out_attention_gives_the_same(name: str) -> None:
    method, pixels = scatter(build(name)), images(3)
    fused = method.logits(pixels)
    method.clip.use_fused(False)
    method._cache.clear()
    torch.testing.assert_close(method.logits(pixels), fused, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="its autocast keeps casts that were made without gradients"
)
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_autocast_stays_finite(name: str, precision: torch.dtype) -> None:
    method, pixels = build(name, torch.float32), images(6, dtype=torch.float32)
    with torch.autocast("cpu", dtype=precision):
        assert torch.isfinite(method.logits(pixels)).all()
        loss = method.loss(pixels, LABELS, DOMAINS)
        assert torch.isfinite(loss.total)
    if name in LEARNING:
        method.backward(loss, lambda x: x)
        learning = {n: p for n, p in method.named_parameters() if n not in LATER.get(name, ())}
        assert all(torch.isfinite(p.grad).all() for p in learning.values())


@pytest.mark.parametrize("name", LEARNING)
def test_a_paused_run_continues_to_the_same_bits(name: str, tmp_path: Path) -> None:
    """Sums over epochs, gate histories, caches and dropout are part of what a pause keeps."""
    task, asked = Colors(domains=2), []

    def fresh() -> Method:
        options = SMALL.get(name, {})
        return build_method(
            name, tiny_clip(dtype=torch.float32), task.classes, roles=mixed_roles(), **options
        )

    recipe = Recipe.of(METHODS[name], epochs=3, batch=5, lr=1e-2)
    whole, cut = fresh(), fresh()
    train(whole, task, recipe)
    with pytest.raises(Paused):
        train(cut, task, recipe, tmp_path / "run", stop=lambda: asked.append(1) or len(asked) == 5)
    again = fresh()
    train(again, task, recipe, tmp_path / "run", resume=True)
    states = whole.adapter_state(), again.adapter_state()
    assert set(states[0]) == set(states[1])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
