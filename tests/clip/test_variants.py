"""Variants of a backbone share its weights and are the same objects while they are used."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import tiny_clip
from torch import nn

from dear.clip.correction import Correction
from dear.clip.factory import pick_device
from dear.clip.model import Clip
from dear.clip.sharing import map_tensors, replace
from dear.clip.variant import matrix_dtype
from dear.errors import InputError, UsageError


@pytest.fixture
def clip() -> Clip:
    return tiny_clip(dtype=torch.float32)


def half(note: str = "") -> Correction:
    return Correction(torch.eye(20) / 2, torch.zeros(20), note=note)


def test_the_same_variant_is_the_same_object(clip: Clip) -> None:
    corrected = clip.with_correction(half())
    assert corrected is clip.with_correction(half())
    assert corrected is not clip.with_correction(half("another note"))
    assert corrected.with_correction(None) is corrected.plain is clip
    assert corrected.cast(torch.bfloat16) is corrected.cast(torch.bfloat16)
    assert corrected.cast(torch.bfloat16) is clip.cast(torch.bfloat16).with_correction(half())
    assert clip.cast(torch.float32) is clip
    assert clip.cast(torch.bfloat16).cast(torch.bfloat16) is clip.cast(torch.bfloat16)


def test_variants_share_weights_and_leave_the_original_alone(clip: Clip) -> None:
    names = set(clip.state_dict())
    other = clip.with_correction(half())
    assert set(other.state_dict()) == names
    for name, parameter in other.named_parameters():
        assert parameter is clip.get_parameter(name), name
    assert (clip.correction, clip.visual.removed_heads) == (None, ())


def test_unused_variants_are_forgotten(clip: Clip) -> None:
    reference = weakref.ref(clip.with_correction(half()))
    gc.collect()
    assert reference() is None
    cast = weakref.ref(clip.with_correction(half()).cast(torch.bfloat16))
    plain = weakref.ref(clip.cast(torch.bfloat16))
    gc.collect()
    assert cast() is None
    assert plain() is not None  # as long as the backbone


def test_a_cast_follows_changed_weights(clip: Clip) -> None:
    before = clip.cast(torch.bfloat16)
    with torch.no_grad():
        clip.visual.blocks[0].mlp.up.weight.mul_(2)
    after = clip.cast(torch.bfloat16)
    assert after is not before
    weight = clip.visual.blocks[0].mlp.up.weight.bfloat16()
    assert torch.equal(after.visual.blocks[0].mlp.up.weight, weight)


def test_a_head_that_does_not_exist_is_refused(clip: Clip) -> None:
    with pytest.raises(UsageError, match="99"):
        clip.with_correction(Correction(torch.eye(20), torch.zeros(20), ((4, 99),)))


def test_replace_keeps_everything_but_the_parts() -> None:
    layer = nn.BatchNorm1d(3)
    other = replace(layer.eval(), nn.BatchNorm1d, bias=None, eps=0.5)
    assert other.weight is layer.weight
    assert other.running_mean is layer.running_mean
    assert (other.bias, other.eps, other.momentum, other.training) == (None, 0.5, layer.momentum, False)
    assert layer.bias is not None
    assert set(other.state_dict()) == set(layer.state_dict()) - {"bias"}


def test_map_tensors_shares_what_does_not_change() -> None:
    pair = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    other = map_tensors(pair, lambda owner, t: t.half() if isinstance(owner, nn.Linear) else t)
    assert other[0].weight.dtype == torch.float16
    assert pair[0].weight.dtype == torch.float32
    assert other[1] is pair[1]


def test_images_are_encoded_from_paths_bytes_and_pillow(clip: Clip, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = [Image.fromarray(generator.integers(0, 256, (30, 40, 3), np.uint8)) for _ in range(3)]
    expected = clip.encode_image(torch.stack([clip.preprocess(image) for image in images]))
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for image, file in zip(images, files, strict=True):
        image.save(file)
    for sources in (images, files, [str(file) for file in files], [file.read_bytes() for file in files]):
        assert torch.equal(clip.encode_image(sources), expected)
    torch.testing.assert_close(clip.encode_image(files[1]), expected[1:2])
    assert clip.encode_image([]).shape == (0, 20)
    with pytest.raises(InputError, match=r"missing\.png"):
        clip.encode_image([files[0], tmp_path / "missing.png"])


@pytest.mark.parametrize(("cuda", "mps", "expected"), [(1, 1, "cuda"), (0, 1, "mps"), (0, 0, "cpu")])
def test_auto_takes_cuda_then_apples_gpu_then_the_cpu(monkeypatch, cuda, mps, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cuda))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: bool(mps))
    assert pick_device("auto") == expected
    if expected == "mps":
        assert matrix_dtype("auto", torch.device("mps")) == torch.float32


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(UsageError, match="mps"):
        pick_device("mps" if not torch.backends.mps.is_available() else "mps:7")
