"""Every family's features are those of transformers, tensor by tensor random, at odd sizes."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
import torch
from families import ODD_VISION

import dear

NEAR = {"rtol": 1e-4, "atol": 1e-5}


def images(size: int = 26) -> torch.Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


def ids(vocab: int = 120, length: int = 11) -> torch.Tensor:
    return torch.randint(3, vocab, (4, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("fused", [True, False])
def test_siglip(tmp_path: Path, fused: bool) -> None:
    model = families.siglip()
    clip = dear.load(families.write(model, tmp_path)).use_fused(fused)
    with torch.no_grad():
        image = model.get_image_features(images()).pooler_output
        text = model.get_text_features(ids()).pooler_output
    torch.testing.assert_close(clip.encode_image(images()), image, **NEAR)
    torch.testing.assert_close(clip.encode_text(ids()), text, **NEAR)
    assert clip.logit_scale == pytest.approx(float(model.logit_scale.detach().exp()), rel=1e-5)
    assert clip.logit_bias == pytest.approx(float(model.logit_bias.detach()), rel=1e-5)
    with torch.no_grad():
        wanted = model(input_ids=ids(), pixel_values=images()).logits_per_image
    torch.testing.assert_close(clip.pair_logits(image, text), wanted, rtol=1e-4, atol=1e-4)


def test_siglip_2_of_fixed_size(tmp_path: Path) -> None:
    model = families.siglip2()
    clip = dear.load(families.write_siglip2(model, tmp_path, ODD_VISION["image_size"]))
    with torch.no_grad():
        image = families.siglip2_features(model, images())
        text = model.get_text_features(ids()).pooler_output
    torch.testing.assert_close(clip.encode_image(images()), image, **NEAR)
    torch.testing.assert_close(clip.encode_text(ids()), text, **NEAR)


def test_metaclip_2(tmp_path: Path) -> None:
    model = families.metaclip2()
    clip = dear.load(families.write(model, tmp_path))
    tokens = ids()
    tokens[:, 0] = 0
    for row, end in enumerate((4, 10, 1, 7)):  # the rest is padding, which nothing may read
        tokens[row, end] = 2
        tokens[row, end + 1 :] = 1
    with torch.no_grad():
        image = model.get_image_features(images()).pooler_output
        text = model.get_text_features(tokens).pooler_output
    torch.testing.assert_close(clip.encode_image(images()), image, **NEAR)
    torch.testing.assert_close(clip.encode_text(tokens), text, **NEAR)
    assert clip.text.cut(tokens[:1]).shape == (1, 5)
