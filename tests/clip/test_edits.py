"""Edits mean the same on every path: causal masks, recorded rows, devices, precisions, odd image sizes."""

from __future__ import annotations

import pytest
import torch
from small_towers import block_mask, small_clip, texts

from dear.clip import BlockMask, Clip, ClipConfig, Edit, LayerEdit, LowRank, Record, TextConfig, VisionConfig
from dear.clip.tower import Attention
from dear.clip.towers import Patches
from dear.errors import InputError, UsageError
from dear.methods.headtools import fold, head_gates, head_masks


@pytest.mark.parametrize("inner_open", [True, False])
def test_isolated_tokens_keep_the_text_tower_causal(inner_open: bool) -> None:
    clip = small_clip("gelu")
    config = clip.config.text
    see = torch.zeros(config.heads, 3, 3, dtype=torch.bool)
    see[:, 0, 0] = True
    see[:, [1, 2], [1, 2]] = True
    see[:, 1:, 1:] |= inner_open
    tokens = torch.randn(2, config.width, dtype=torch.double)
    change = LayerEdit(tokens=tokens, mask=BlockMask(see))
    edit = Edit({2: change, 3: change}, count=2)
    x = clip.text.embed(texts())
    fused, eager = (clip.use_fused(f).text.run(x, edit=edit) for f in (True, False))
    torch.testing.assert_close(fused, eager, rtol=1e-10, atol=1e-10)
    # Nothing that follows a token may reach it: other words at the end, the same first rows.
    other = x.clone()
    other[:, 5:] += 1
    changed = clip.use_fused(True).text.run(other, edit=edit)
    torch.testing.assert_close(changed[:, :5], fused[:, :5], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(2, 5), slice(-2, None), slice(None)])
@pytest.mark.parametrize("read", [[0], [4, 2, 3], [0, 10, 11]])
def test_recorded_rows_are_rows_of_the_sequence_in_every_layer(rows: slice, read: list[int]) -> None:
    clip = small_clip("gelu")
    tokens = torch.randn(2, clip.config.vision.width, dtype=torch.double)
    edit = Edit({6: LayerEdit(tokens=tokens, mask=block_mask((1,)))}, count=2)
    pixels = torch.randn(2, 3, 24, 24, dtype=torch.double)
    x = clip.visual.embed(pixels)
    whole, short = Record(rows, pattern=True), Record(rows, pattern=True)
    everything = clip.visual.run(x, edit=edit, record=whole)
    part = clip.visual.run(x, edit=edit, read=torch.tensor(read), record=short)
    torch.testing.assert_close(part, everything[:, read])
    assert set(whole) == set(short)
    for name in whole:
        torch.testing.assert_close(short[name], whole[name], msg=name)


def test_recorded_rows_of_texts_read_at_their_ends() -> None:
    clip = small_clip("gelu")
    whole, short = Record(slice(1, 4)), Record(slice(1, 4))
    x = clip.text.embed(texts())
    ends = clip.text.eot(texts())[:, None]
    everything = clip.text.run(x, record=whole)
    part = clip.text.run(x, read=ends, record=short)
    torch.testing.assert_close(part[:, 0], everything[torch.arange(3), ends[:, 0]])
    torch.testing.assert_close(short["blocks.3.out"], whole["blocks.3.out"])


@pytest.mark.parametrize("size", [26, 24, 31])
def test_both_ways_to_cut_patches_ignore_the_pixels_beyond_the_last_patch(size: int) -> None:
    torch.manual_seed(0)
    patches = Patches(10, 8)
    torch.nn.init.normal_(patches.weight)
    pixels = torch.randn(2, 3, size, size)
    expected = torch.stack(
        [
            torch.einsum("bchw,dchw->bd", pixels[:, :, r * 8 : r * 8 + 8, c * 8 : c * 8 + 8], patches.weight)
            for r in range(size // 8)
            for c in range(size // 8)
        ],
        dim=1,
    )
    torch.testing.assert_close(patches.as_product(pixels), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(patches.as_convolution(pixels), expected, rtol=1e-4, atol=1e-4)


def test_a_block_mask_cannot_hide_the_originals_from_each_other() -> None:
    see = torch.ones(3, 2, 2, dtype=torch.bool)
    see[1, 0, 0] = False
    with pytest.raises(UsageError, match=r"visible\[1, 0, 0\]"):
        BlockMask(see)


def test_folded_weights_keep_the_precision_of_every_tensor_and_share_none() -> None:
    clip = small_clip("gelu").float()
    for name, module in clip.named_modules():
        if not name.rpartition(".")[2].startswith("ln_"):
            for p in module.parameters(recurse=False):
                p.data = p.data.bfloat16()
    folded = fold(clip, head_gates(clip.config.vision, {(3, 1): 0.5}))
    before = clip.state_dict()
    changed = "visual.blocks.2.attn.o.weight"
    for name, tensor in folded.state_dict().items():
        assert tensor.dtype == before[name].dtype, name
        assert tensor.data_ptr() != before[name].data_ptr(), name
        assert torch.equal(tensor, before[name]) == (name != changed), name


@pytest.fixture
def meta_attention() -> Attention:
    """A layer on a device that is not the CPU: PyTorch's meta device refuses to mix as a GPU does."""
    with torch.device("meta"):
        return Attention(TextConfig(width=24, layers=1, heads=3), causal=False)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("read", [None, [0, 2]])
def test_edits_made_on_the_cpu_work_on_a_model_elsewhere(
    meta_attention: Attention, fused: bool, read: list[int] | None
) -> None:
    config = TextConfig(width=24, layers=1, heads=3)
    pair = LowRank(torch.zeros(3, 2, 24), torch.zeros(3, 8, 2))
    gates = head_gates(config, {(1, 1): 0.5}).layers[1].gate
    hidden = torch.eye(5, dtype=torch.bool)
    mask = head_masks(config, {(1, 2): hidden}).layers[1].mask
    rows = None if read is None else torch.tensor(read, device="meta")
    x = torch.empty(2, 5, 24, device="meta")
    z, _ = meta_attention.heads_output(x, LayerEdit(mask=mask, gate=gates, q=pair), rows, 0, fused)
    assert z.device.type == "meta"


def test_gates_and_masks_are_made_where_their_tensors_are() -> None:
    config = TextConfig(width=24, layers=1, heads=3)
    gate = head_gates(config, {(1, 0): 0.5, (1, 1): torch.ones((), device="meta")}).layers[1].gate
    assert gate is not None
    assert gate.device.type == "meta"
    learned = torch.tensor(2.0, requires_grad=True)
    head_gates(config, {(1, 1): learned}).layers[1].gate.sum().backward()
    assert learned.grad == 1


@pytest.mark.parametrize("fused", [True, False])
def test_a_float32_mask_on_a_16_bit_tower(fused: bool) -> None:
    clip = small_clip("gelu").to(torch.bfloat16).use_fused(fused)
    n = clip.config.vision.positions
    mask = torch.zeros(5, n, n)
    mask[2, :, 3:] = float("-inf")
    pixels = torch.randn(1, 3, 24, 24).bfloat16()
    assert clip.visual(pixels, Edit({7: LayerEdit(mask=mask)})).isfinite().all()


@pytest.mark.parametrize(
    ("change", "count", "words"),
    [
        ({"mask": torch.zeros(5, 9, 9)}, 0, r"\[5 or 1, 10, 10\].*\[5, 9, 9\]"),
        ({"mask": torch.zeros(4, 10, 10)}, 0, r"\[4, 10, 10\]"),
        ({"mask": BlockMask(torch.ones(5, 4, 4, dtype=torch.bool))}, 0, r"\b0\b.*\b3\b"),
        ({"tokens": torch.zeros(3, 2, 40)}, 2, r"\[2, 10, 40\].*\[3, 2, 40\]"),
        ({"tokens": torch.zeros(2, 39)}, 2, r"\[2, 39\]"),
    ],
)
def test_an_edit_of_another_size_is_refused_on_every_path(change: dict, count: int, words: str) -> None:
    clip = small_clip("gelu")
    pixels = torch.randn(2, 3, 24, 24, dtype=torch.double)
    for fused in (True, False):
        with pytest.raises(UsageError, match=words):
            clip.use_fused(fused).visual(pixels, Edit({7: LayerEdit(**change)}, count=count))


def test_gates_have_no_batch() -> None:
    with pytest.raises(UsageError, match=r"gate.*\[2, 5\]"):
        LayerEdit(gate=torch.ones(2, 5))


@pytest.mark.parametrize("fused", [True, False])
def test_a_mask_per_item_is_that_items_mask(fused: bool) -> None:
    clip, generator = small_clip("gelu").use_fused(fused), torch.Generator().manual_seed(0)
    visual, pixels = clip.visual, torch.randn(2, 3, 24, 24, dtype=torch.double, generator=generator)
    x, heads = visual.embed(pixels), clip.config.vision.heads
    masks = torch.randn(2, heads, x.shape[1], x.shape[1], dtype=torch.double, generator=generator)
    for read in (None, torch.tensor([0, 3]), torch.tensor([[0, 3], [2, 1]])):
        outputs = visual.run(x, edit=Edit({7: LayerEdit(mask=masks)}), read=read)
        for item in range(2):
            item_rows = read if read is None or read.ndim == 1 else read[item]
            alone = visual.run(
                x[item : item + 1], edit=Edit({7: LayerEdit(mask=masks[item])}), read=item_rows
            )
            torch.testing.assert_close(outputs[item : item + 1], alone)
    with pytest.raises(UsageError, match=r"\[2, 5, 10, 10\]"):
        visual.run(x[:1], edit=Edit({7: LayerEdit(mask=masks)}))


def test_one_set_of_tokens_serves_a_batch() -> None:
    clip = small_clip("gelu")
    pixels, tokens = torch.randn(3, 3, 24, 24).double(), torch.randn(2, 40).double()
    one = clip.visual(pixels, Edit({6: LayerEdit(tokens=tokens)}, count=2))
    other = clip.visual(pixels, Edit({6: LayerEdit(tokens=tokens[None])}, count=2))
    assert torch.equal(one, other)


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    clip = small_clip("gelu")
    ids = texts()
    ids[1, 2] = clip.config.text.vocab
    with pytest.raises(InputError, match=str(clip.config.text.vocab)):
        clip.encode_text(ids)


def test_no_text_gives_no_feature_in_the_models_precision() -> None:
    clip = small_clip("gelu")
    assert clip.encode_text([]).dtype == clip.encode_text(texts()).dtype


def test_the_last_third_of_a_tower() -> None:
    def layers(depth: int) -> tuple[int, ...]:
        return VisionConfig(width=8, layers=depth, heads=2).last_third

    assert layers(12) == (9, 10, 11, 12)
    assert layers(24) == tuple(range(17, 25))
    assert layers(1) == (1,)
    assert Clip(ClipConfig.named("ViT-B-32")).config.text.last_third[0] == 9


def test_pixels_and_token_ids_of_another_type_are_refused() -> None:
    clip = small_clip()
    size = clip.config.vision.image_size
    with pytest.raises(InputError, match="uint8"):
        clip.encode_image(torch.zeros(1, 3, size, size, dtype=torch.uint8))
    for ids in (torch.zeros(2, 5), torch.zeros(5, dtype=torch.int64)):
        with pytest.raises(InputError, match=str(ids.dtype)):
            clip.encode_text(ids)
