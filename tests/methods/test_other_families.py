"""Every method on a tiny SigLIP and a tiny PE-Core: it learns, saves, answers, or refuses with a sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from other_families import FAMILIES, NAMES, SIGLIP, model
from tiny import SMALL, images, mixed_roles

import dear
from dear.clip import BlockMask, Edit, LayerEdit
from dear.clip.rows import Rows
from dear.errors import UsageError
from dear.heads.roles import RoleMap
from dear.methods import METHODS, Batch, Method, build_method

LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
DOMAINS = torch.tensor([0, 0, 1, 1, 2, 2])
REFUSED = {
    ("siglip", "prolip"): "tiny",
    **{
        (family, name): "class token"
        for family in ("siglip", "perception")
        for name in ("rpo", "skip-tuning", "two-stage")
    },
}


def build(name: str, family: str, **options) -> Method:
    clip = model(FAMILIES[family])
    method = build_method(name, clip, NAMES, roles=mixed_roles(), **{**SMALL.get(name, {}), **options})
    pixels = images(6, size=clip.config.vision.image_size)
    method.prepare(lambda augment: iter([Batch(pixels, LABELS, DOMAINS)]))
    return method


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_learns_saves_and_answers_or_refuses(name: str, family: str) -> None:
    if (family, name) in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[family, name]):
            build(name, family)
        return
    method = build(name, family)
    pixels = images(6, size=method.clip.config.vision.image_size)
    learned = list(method.parameters())
    if learned and name != "tip-adapter":
        optimizer, losses = torch.optim.Adam(learned, 1e-2), []
        for _ in range(8):
            torch.manual_seed(0)
            optimizer.zero_grad()
            loss = method.loss(pixels, LABELS, DOMAINS)
            method.backward(loss, lambda x: x)
            optimizer.step()
            losses.append(float(loss.total.detach()))
        # Tip-Adapter-F answers its training images almost perfectly before any step.
        assert min(losses[1:]) < losses[0] or losses[0] < 0.01, losses
    logits = method.logits(pixels)
    assert logits.shape == (6, 3)
    assert logits.isfinite().all()
    again = build_method(name, method.clip, NAMES, roles=mixed_roles(), seed=9, config=method.config)
    again.load_adapter_state(method.adapter_state())
    assert torch.equal(again.logits(pixels), logits)
    method.clip.use_fused(False)
    method._cache.clear()
    torch.testing.assert_close(method.logits(pixels), logits, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_attribute_tokens_that_all_heads_isolate_leave_the_image_feature_alone(family: str) -> None:
    clip = model(FAMILIES[family])
    roles = RoleMap.uniform("generalization", range(4, 7), 4)
    method = build_method("dear", clip, NAMES, roles=roles, attributes=("Color", "Shape"), early_tokens=0)
    pixels = images(3, size=clip.config.vision.image_size)
    with torch.no_grad():
        feature, attributes = method.image_features(pixels)
    torch.testing.assert_close(feature, clip.encode_image(pixels), rtol=1e-9, atol=1e-9)
    assert attributes.shape == (3, 2, clip.config.embed_dim)
    open_roles = RoleMap.uniform("mixed", range(4, 7), 4)
    other = build_method("dear", clip, NAMES, roles=open_roles, attributes=("Color", "Shape"), early_tokens=0)
    assert (other.image_features(pixels)[0] - feature).abs().max() > 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_core_heads_read_their_own_token_alone(family: str) -> None:
    """A token whose heads are all another attribute's changes nothing but its own feature."""
    clip = model(FAMILIES[family])
    x = torch.randn(2, clip.config.vision.positions, clip.config.vision.width, dtype=torch.float64)
    see = torch.ones(4, 3, 3, dtype=torch.bool)
    see[:, :, 2] = False  # nobody reads token 2 ...
    see[:, 2, 2] = True  # ... but itself
    tokens = torch.randn(2, clip.config.vision.width, dtype=torch.float64)
    results = []
    for change in (torch.zeros_like(tokens[1]), torch.randn_like(tokens[1])):
        layer_tokens = torch.stack([tokens[0], tokens[1] + change])
        layers = {layer: LayerEdit(tokens=layer_tokens, mask=BlockMask(see)) for layer in (5, 6)}
        results.append(clip.visual.run(x, first=5, edit=Edit(layers, count=2)))
    pooled = [clip.visual.pooled(Rows(y if clip.visual.pool else y[:, [0, -2, -1]]), 2) for y in results]
    torch.testing.assert_close(pooled[0][:, :2], pooled[1][:, :2], rtol=1e-9, atol=1e-9)
    assert (pooled[0][:, 2] - pooled[1][:, 2]).abs().max() > 1e-5


def test_a_note_says_where_a_gpu_takes_the_plain_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dear.clip.gpu import tower as gpu
    from dear.utils.notices import note

    note.cache_clear()
    monkeypatch.setattr(gpu, "_kernels", lambda: gpu)  # as if Triton built them
    on_gpu: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    perception, siglip = (model(FAMILIES[f], torch.bfloat16) for f in ("perception", "siglip"))
    with caplog.at_level("INFO", logger="dear"):
        assert gpu.is_supported(siglip.visual, on_gpu, None)
        assert gpu.is_supported(perception.text, on_gpu, None)
        assert not caplog.records
        for _ in range(2):
            assert not gpu.is_supported(perception.visual, on_gpu, None)
    assert len(caplog.records) == 1
    assert "rotary positions take the plain path on a GPU" in caplog.text


def test_one_variable_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from dear.clip.gpu import run_by_kernels
    from dear.clip.gpu import tower as kernels

    monkeypatch.setattr(kernels, "is_supported", lambda tower, x, edit: True)
    monkeypatch.setattr(kernels, "run", lambda tower, x, first, last, edit, read: x + 1)
    visual, x = model(FAMILIES["siglip"], torch.float32).visual, torch.zeros(1)
    assert run_by_kernels(visual, x, 1, 2, None, None) == 1
    monkeypatch.setenv("DEAR_KERNELS", "0")
    assert run_by_kernels(visual, x, 1, 2, None, None) is None


def test_adapting_a_siglip_folder(tmp_path: Path) -> None:
    """Train, save, load and answer with the public functions."""
    from tiny import Colors

    from dear.runs.folder import load_run
    from dear.runs.recipe import Recipe
    from dear.train.run import train

    clip = model(SIGLIP, torch.float32)
    method = build_method("dear", clip, Colors().classes, roles=mixed_roles())
    train(method, Colors(size=26), Recipe(epochs=1, batch=4), tmp_path / "run")
    loaded = load_run(tmp_path / "run", clip)
    pixels = images(2, size=26, dtype=torch.float32)
    assert torch.equal(loaded.logits(pixels), method.logits(pixels))
    assert dear.list_methods()
