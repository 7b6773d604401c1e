"""Towers, edits and partial runs against a plain-loop numpy attention."""

from __future__ import annotations

import numpy as np
import plain
import pytest
import torch
from small_towers import block_mask, small_clip, texts

from dear.clip import BlockMask, Clip, ClipConfig, Edit, LayerEdit, LowRank, Record, VisionConfig
from dear.errors import CheckpointError, InputError, UsageError


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.randn(2, 3, 24, 24, dtype=torch.double, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["quick_gelu", "gelu"])
def clip(request: pytest.FixtureRequest) -> Clip:
    return small_clip(request.param)


def weights(clip: Clip) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in clip.state_dict().items()}


@pytest.mark.parametrize("fused", [True, False])
def test_features_equal_the_plain_loop(clip: Clip, pixels: torch.Tensor, fused: bool) -> None:
    clip.use_fused(fused)
    w = weights(clip)
    expected = np.stack([plain.visual(p.numpy(), w, clip.config.vision) for p in pixels])
    np.testing.assert_allclose(clip.encode_image(pixels).numpy(), expected, rtol=1e-9, atol=1e-9)
    expected = np.stack([plain.text(row.numpy(), w, clip.config.text) for row in texts()])
    np.testing.assert_allclose(clip.encode_text(texts()).numpy(), expected, rtol=1e-9, atol=1e-9)


def test_clip_is_frozen_and_stays_in_eval_mode(clip: Clip) -> None:
    assert not any(p.requires_grad for p in clip.parameters())
    assert not clip.train().training


def test_an_edit_that_changes_nothing_changes_no_bit_on_the_eager_path(
    clip: Clip, pixels: torch.Tensor
) -> None:
    clip.use_fused(False)
    heads, n, width = 5, clip.config.vision.positions, 40
    nothing = LowRank(torch.randn(heads, 2, width).double(), torch.zeros(heads, 8, 2).double())
    edit = Edit(
        {
            layer: LayerEdit(
                mask=torch.zeros(heads, n, n).double(),
                gate=torch.ones(heads).double(),
                q=nothing,
                k=nothing,
                v=nothing,
            )
            for layer in range(1, 8)
        }
    )
    assert torch.equal(clip.visual(pixels, edit), clip.visual(pixels))


def test_mask_gate_and_delta_on_single_heads_do_what_the_plain_loop_says(
    clip: Clip, pixels: torch.Tensor
) -> None:
    heads, n, width = 5, clip.config.vision.positions, 40
    rng = torch.Generator().manual_seed(3)
    mask = torch.zeros(heads, n, n).double()
    mask[3, :, 4:7] = float("-inf")
    gate = torch.rand(heads, generator=rng).double()
    down, up = (
        torch.randn(heads, 2, width, generator=rng).double(),
        torch.randn(heads, 8, 2, generator=rng).double(),
    )
    up[[0, 1, 3, 4]] = 0  # head 2 alone changes
    delta = LowRank(down, up, scale=0.5)
    edit = Edit({5: LayerEdit(mask=mask), 6: LayerEdit(gate=gate), 7: LayerEdit(q=delta, v=delta)})
    matrix = np.concatenate([0.5 * up[h].numpy() @ down[h].numpy() for h in range(heads)])
    changes = {5: {"mask": mask.numpy()}, 6: {"gate": gate.numpy()}, 7: {"dq": matrix, "dv": matrix}}
    expected = np.stack([plain.visual(p.numpy(), weights(clip), clip.config.vision, changes) for p in pixels])
    for fused in (True, False):
        got = clip.use_fused(fused).visual(pixels, edit).numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
    assert np.abs(expected - clip.encode_image(pixels).numpy()).max() > 1e-3
    np.testing.assert_allclose(delta.matrix().numpy(), matrix, rtol=1e-12)


@pytest.mark.parametrize("fused", [True, False])
def test_tokens_that_every_head_ignores_leave_the_class_token_unchanged(
    clip: Clip, pixels: torch.Tensor, fused: bool
) -> None:
    clip.use_fused(fused)
    tokens = torch.randn(2, 40).double()
    apart = Edit(
        {layer: LayerEdit(tokens=tokens, token_weight=0.9, mask=block_mask()) for layer in (5, 6, 7)}, count=2
    )
    torch.testing.assert_close(clip.visual(pixels, apart), clip.visual(pixels), rtol=1e-10, atol=1e-10)
    one_open = Edit(
        {layer: LayerEdit(tokens=tokens, token_weight=0.9, mask=block_mask((2,))) for layer in (5, 6, 7)},
        count=2,
    )
    assert (clip.visual(pixels, one_open) - clip.visual(pixels)).abs().max() > 1e-3


def test_block_mask_equals_the_written_out_mask(clip: Clip, pixels: torch.Tensor) -> None:
    tokens, n = torch.randn(2, 40).double(), clip.config.vision.positions
    for heads in ((), (1,), (0, 1, 2, 3, 4)):
        mask = block_mask(heads)
        full = torch.zeros(5, n + 2, n + 2).double()
        for h in range(5):
            for i in range(n + 2):
                for j in range(n + 2):
                    if not mask.visible[h, max(0, i - n + 1), max(0, j - n + 1)]:
                        full[h, i, j] = float("-inf")
        blocks = Edit({6: LayerEdit(tokens=tokens, mask=mask), 7: LayerEdit(mask=mask)}, count=2)
        plainly = Edit({6: LayerEdit(tokens=tokens, mask=full), 7: LayerEdit(mask=full)}, count=2)
        x = clip.visual.embed(pixels)
        torch.testing.assert_close(clip.visual.run(x, edit=blocks), clip.visual.run(x, edit=plainly))


def test_anchor_mixes_the_raw_token_with_the_output_of_the_layer_before(
    clip: Clip, pixels: torch.Tensor
) -> None:
    tokens, n = torch.randn(2, 40).double(), clip.config.vision.positions
    edit = Edit(
        {6: LayerEdit(tokens=tokens, token_weight=0.9), 7: LayerEdit(tokens=tokens, token_weight=0.9)},
        count=2,
    )
    x = clip.visual.embed(pixels)
    sixth = clip.visual.run(x, last=6, edit=edit)
    mixed = sixth.clone()
    mixed[:, n:] = 0.9 * tokens + 0.1 * sixth[:, n:]
    by_hand = clip.visual.blocks[6](mixed)
    torch.testing.assert_close(clip.visual.run(x, edit=edit), by_hand)


def test_prefix_and_suffix_make_the_whole(clip: Clip, pixels: torch.Tensor) -> None:
    tokens = torch.randn(2, 40).double()
    edit = Edit({layer: LayerEdit(tokens=tokens, token_weight=0.7) for layer in (4, 5, 6, 7)}, count=2)
    x = clip.visual.embed(pixels)
    whole = clip.visual.run(x, edit=edit)
    for cut in (2, 3, 5):  # before, at and inside the edited layers
        part = clip.visual.run(clip.visual.run(x, last=cut, edit=edit), first=cut + 1, edit=edit)
        torch.testing.assert_close(part, whole)


def test_short_last_layer_equals_the_full_one(clip: Clip, pixels: torch.Tensor) -> None:
    tokens, n = torch.randn(2, 40).double(), clip.config.vision.positions
    edit = Edit(
        {6: LayerEdit(tokens=tokens, mask=block_mask((1, 3))), 7: LayerEdit(mask=block_mask((0,)))}, count=2
    )
    x = clip.visual.embed(pixels)
    whole = clip.visual.run(x, edit=edit)
    rows = torch.tensor([0, n, n + 1])
    torch.testing.assert_close(clip.visual.run(x, edit=edit, read=rows), whole[:, rows])
    ids = texts()
    full = clip.text.run(clip.text.embed(ids))
    ends = ids.argmax(-1)
    short = clip.text.run(clip.text.embed(ids), read=ends[:, None])
    torch.testing.assert_close(short[:, 0], full[torch.arange(3), ends])


def test_cut_text_equals_full_text_also_with_tokens_after_bot(clip: Clip) -> None:
    ids, tokens = texts(), torch.randn(2, 24).double()
    edit = Edit({2: LayerEdit(tokens=tokens), 3: LayerEdit(tokens=tokens, token_weight=0.9)}, count=2, at=1)
    full = clip.text.run(clip.text.embed(ids), edit=edit)
    ends = ids.argmax(-1) + 2
    torch.testing.assert_close(clip.text(ids, edit), clip.text.project(full[torch.arange(3), ends]))
    assert clip.text.trim_padding(ids).shape[1] == 7


def test_fused_and_eager_agree_forward_and_backward(clip: Clip, pixels: torch.Tensor) -> None:
    gradients = []
    for fused in (True, False):
        clip.use_fused(fused)
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randn(2, 40, generator=generator).double().requires_grad_()
        gate = torch.rand(5, generator=generator).double().requires_grad_()
        words = torch.randn(2, 24, generator=generator).double().requires_grad_()
        image = Edit(
            {
                layer: LayerEdit(tokens=tokens, token_weight=0.9, mask=block_mask((1,)), gate=gate)
                for layer in (6, 7)
            },
            count=2,
        )
        text = Edit({3: LayerEdit(tokens=words)}, count=2, at=1)
        value = clip.visual(pixels, image).pow(2).sum() + clip.text(texts(), text).pow(2).sum()
        gradients.append(torch.autograd.grad(value, [tokens, gate, words]))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().max() > 1e-6


def test_record_names_what_happened(clip: Clip, pixels: torch.Tensor) -> None:
    record = Record(pattern=True)
    clip.visual(pixels, record=record)
    z = record["blocks.7.attn.heads"]
    assert z.shape == (2, 5, 1, 8)
    pattern = record["blocks.3.attn.pattern"]
    assert pattern.shape == (2, 5, 1, 10)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(2, 5, 1).double())
    last = record["blocks.6.out"] + clip.visual.blocks[6].attn.merge(z) + record["blocks.7.mlp"]
    torch.testing.assert_close(last, record["blocks.7.out"])


def test_wrong_use_is_named(clip: Clip, pixels: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"\[B, 3, 24, 24\].*\[2, 3, 20, 20\]"):
        clip.encode_image(pixels[:, :, :20, :20])
    with pytest.raises(UsageError, match=r"\b9\b"):
        clip.visual(pixels, Edit({9: LayerEdit()}))
    with pytest.raises(UsageError, match=r"\b0\b"):
        Edit({0: LayerEdit()})
    with pytest.raises(UsageError, match=r"\b2\b.*\b3\b"):
        Edit({1: LayerEdit(tokens=torch.zeros(3, 40))}, count=2)
    with pytest.raises(UsageError, match=r"row 0"):
        BlockMask(torch.zeros(5, 3, 3, dtype=torch.bool))
    with pytest.raises(CheckpointError, match=r"\b5\b.*42"):
        VisionConfig(width=42, layers=2, heads=5)
    with pytest.raises(UsageError, match="ViT-B-17"):
        ClipConfig.named("ViT-B-17")
