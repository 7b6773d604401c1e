"""Low-rank changes, gates and masks of single heads, as edits of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from literal_dear import INF, block, norm
from tiny import images, tiny_clip

from dear.clip import Clip, Edit, LayerEdit, Record
from dear.errors import UsageError
from dear.methods import HeadLoRA, combine, fold, head_gates, head_masks


def literal(clip: Clip, pixels: torch.Tensor, weights: dict, masks: dict | None = None) -> torch.Tensor:
    c = clip.config.vision
    x = clip.visual.embed(pixels)
    for layer in range(1, c.layers + 1):
        mask = torch.zeros(c.heads, x.shape[1], x.shape[1], dtype=x.dtype)
        if masks and layer in masks:
            mask = masks[layer]
        x = block(weights, f"visual.blocks.{layer - 1}", x, c.heads, mask, True, c.eps)
    x = norm(x[:, 0], weights["visual.ln_post.weight"], weights["visual.ln_post.bias"], c.eps)
    return x @ weights["visual.proj"]


def lora(clip: Clip, heads, **options) -> HeadLoRA:
    tool = HeadLoRA(clip.config.vision, heads, **options).double()
    with torch.no_grad():
        tool.up.normal_(generator=torch.Generator().manual_seed(0))
    return tool


def test_lora_changes_the_rows_of_its_heads_alone() -> None:
    clip, pixels = tiny_clip(), images()
    heads = [(2, 3), (6, 0), (6, 2)]
    tool = lora(clip, heads, rank=3, on=("q", "k", "v"), scale=0.5)
    weights = clip.state_dict()
    for n, (layer, head) in enumerate(sorted(heads)):
        for p, name in enumerate(("q", "k", "v")):
            key = f"visual.blocks.{layer - 1}.attn.{name}.weight"
            changed = weights[key].clone()
            changed[head * 9 : (head + 1) * 9] += 0.5 * (tool.up[p, n] @ tool.down[p, n]).detach()
            weights[key] = changed
    expected = literal(clip, pixels, weights)
    torch.testing.assert_close(clip.visual(pixels, tool.edit()).detach(), expected)
    assert not torch.allclose(expected, clip.encode_image(pixels))
    clip.visual(pixels, tool.edit()).sum().backward()
    assert all((p.grad.flatten(2).abs().sum(-1) > 0).all() for p in tool.parameters())


def test_lora_on_one_head_leaves_the_others_outputs_alone() -> None:
    clip, pixels = tiny_clip(), images()
    tool = lora(clip, [(1, 2)])
    before, after = Record(rows=slice(0, 10)), Record(rows=slice(0, 10))
    clip.visual.run(clip.visual.embed(pixels), last=1, record=before)
    clip.visual.run(clip.visual.embed(pixels), last=1, edit=tool.edit(), record=after)
    changed = (before["blocks.1.attn.heads"] - after["blocks.1.attn.heads"]).abs().amax(dim=(0, 2, 3)) > 0
    assert changed.tolist() == [False, False, True, False]


def test_lora_starts_as_the_frozen_model_and_works_on_text() -> None:
    clip = tiny_clip()
    tool = HeadLoRA(clip.config.text, [(5, 1)]).double()
    ids = clip.tokenize(["a cat", "an old dog"])
    torch.testing.assert_close(clip.text(ids, tool.edit()).detach(), clip.encode_text(ids))
    with torch.no_grad():
        tool.up.fill_(0.3)
    assert not torch.allclose(clip.text(ids, tool.edit()).detach(), clip.encode_text(ids))


def test_a_gate_of_zero_removes_the_head() -> None:
    clip, pixels = tiny_clip(), images()
    weights = clip.state_dict()
    key = "visual.blocks.3.attn.o.weight"
    weights[key] = weights[key].clone()
    weights[key][:, 9:18] = 0
    gated = clip.visual(pixels, head_gates(clip.config.vision, {(4, 1): 0.0}))
    torch.testing.assert_close(gated, literal(clip, pixels, weights))
    same = clip.visual(pixels, head_gates(clip.config.vision, {(4, 1): 1.0, (2, 0): 1.0}))
    torch.testing.assert_close(same, clip.encode_image(pixels))


def test_gates_can_learn() -> None:
    clip, pixels = tiny_clip(), images()
    gate = torch.ones((), dtype=torch.float64, requires_grad=True)
    clip.visual(pixels, head_gates(clip.config.vision, {(6, 3): gate})).sum().backward()
    assert gate.grad is not None
    assert float(gate.grad.abs()) > 0


def test_masks_hide_keys_in_one_head() -> None:
    clip, pixels = tiny_clip(), images()
    hidden = torch.zeros(10, 10, dtype=torch.bool)
    hidden[0, 4:] = True  # the class token of this head reads three patches only
    mask = torch.zeros(4, 10, 10, dtype=torch.float64)
    mask[2].masked_fill_(hidden, INF)
    masked = clip.visual(pixels, head_masks(clip.config.vision, {(5, 2): hidden}))
    torch.testing.assert_close(masked, literal(clip, pixels, clip.state_dict(), {5: mask}))
    record = Record(pattern=True)
    clip.visual.run(
        clip.visual.embed(pixels), edit=head_masks(clip.config.vision, {(5, 2): hidden}), record=record
    )
    pattern = record["blocks.5.attn.pattern"]
    assert float(pattern[:, 2, 0, 4:].abs().max()) == 0
    assert float(pattern[:, 1, 0, 4:].min()) > 0


def test_edits_combine_and_fold() -> None:
    clip, pixels = tiny_clip(), images()
    config = clip.config.vision
    edit = combine(lora(clip, [(3, 1), (6, 0)]).edit(), head_gates(config, {(3, 0): 0.2, (1, 3): 2.0}))
    assert set(edit.layers) == {1, 3, 6}
    plain = fold(clip, visual=edit)
    changed = clip.visual(pixels, edit).detach()
    torch.testing.assert_close(plain.encode_image(pixels), changed)
    assert not np.allclose(changed, clip.encode_image(pixels))
    assert torch.equal(plain.encode_text(["a cat"]), clip.encode_text(["a cat"]))
    tokens = Edit({2: LayerEdit(tokens=torch.zeros(1, 36, dtype=torch.float64), token_weight=0.5)}, count=1)
    both = combine(tokens, edit)
    assert (both.count, both.first, both.layers[2].token_weight) == (1, 2, 0.5)
    with pytest.raises(UsageError, match="layer 3"):
        combine(edit, head_gates(config, {(3, 2): 0.0}))
    with pytest.raises(UsageError, match="2"):
        combine(tokens, tokens)
    with pytest.raises(UsageError, match="layer 2"):
        fold(clip, visual=both)


@pytest.mark.parametrize("head", [(0, 0), (7, 0), (1, 4), (1, -1)])
def test_heads_that_do_not_exist_are_named(head: tuple[int, int]) -> None:
    config = tiny_clip().config.vision
    with pytest.raises(UsageError, match=rf"head {head[1]} .*layer {head[0]}"):
        HeadLoRA(config, [head])
    with pytest.raises(UsageError, match=rf"head {head[1]} .*layer {head[0]}"):
        head_gates(config, {head: 0.0})


def test_bad_masks_and_ranks_are_refused() -> None:
    config = tiny_clip().config.vision
    with pytest.raises(UsageError, match="head 0 in layer 1"):
        head_masks(config, {(1, 0): torch.ones(3, 3, dtype=torch.bool)})
    sizes = {(1, h): torch.zeros(n, n, dtype=torch.bool) for h, n in ((0, 3), (1, 4))}
    with pytest.raises(UsageError, match="layer 1"):
        head_masks(config, sizes)
    with pytest.raises(UsageError, match="rank"):
        HeadLoRA(config, [(1, 0)], rank=0)
