"""Every family's features are those of transformers, tensor by tensor random, at odd sizes."""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest
import torch
from families import ODD_VISION

import dear
from dear.clip import BlockMask, Edit, LayerEdit
from dear.errors import CheckpointError, InputError, UsageError

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
    assert float(clip.pair_bias) == pytest.approx(float(model.logit_bias.detach()), rel=1e-5)


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
    assert clip.text.trim_padding(tokens[:1]).shape == (1, 5)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ({"model_type": "siglip2"}, None, "NaFlex"),
        ({"model_type": "altclip"}, None, "altclip"),
        ({"model_type": "blip"}, None, "blip"),
        ("vision_config", {"vision_use_head": False}, "pooling head"),
        ("vision_config", {"hidden_act": "relu"}, "hidden_act"),
        ("vision_config", {"num_attention_heads": 7}, "7.*40"),
        ("vision_config", {"num_hidden_layers": 10**6}, "layers"),
        ("vision_config", {"image_size": -3}, "image_size"),
        ("vision_config", {"hidden_size": "40"}, "hidden_size"),
        ("text_config", {"projection_size": 17}, "40.*17"),
        ("text_config", {"vocab_size": 10**9}, "vocab"),
        ("text_config", {"layer_norm_eps": 0}, "layer_norm_eps"),
        ("text_config", [], r"\[\]"),
    ],
)
def test_wrong_configurations_are_refused_with_a_sentence(tmp_path: Path, place, value, words: str) -> None:
    families.write(families.siglip(), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    if isinstance(place, dict):
        raw |= place
    else:
        raw[place] = {**raw[place], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=rf"config\.json.*{words}"):
        dear.load(tmp_path)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ({"size": {"height": 30, "width": 26}}, "26"),
        ({"resample": 0}, "resample = 0"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor"),
        ({"do_normalize": False}, "do_normalize"),
        ({"image_mean": [1, 2]}, r"\[1, 2\]"),
    ],
)
def test_other_ways_to_prepare_images_are_refused(tmp_path: Path, images: dict, words: str) -> None:
    families.write(families.siglip(), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    with pytest.raises(CheckpointError, match=words):
        dear.load(tmp_path)


def test_how_images_are_prepared_is_read(tmp_path: Path) -> None:
    families.write(families.siglip(), tmp_path)
    assert (dear.load(tmp_path).config.resize, dear.load(tmp_path).config.mean[0]) == ("squash", 0.5)
    given = {"size": {"height": 26, "width": 26}, "resample": 2, "image_mean": [0.1, 0.2, 0.3]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    config = dear.load(tmp_path).config
    assert (config.resize, config.interpolation, config.mean) == ("squash", "bilinear", (0.1, 0.2, 0.3))


def test_without_a_tokenizer_ids_still_work(tmp_path: Path) -> None:
    clip = dear.load(families.write(families.siglip(), tmp_path))
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        clip.encode_text(["a cat"])
    assert clip.encode_text(ids()).shape == (4, 40)
    with pytest.raises(InputError, match="119"):
        clip.encode_text(ids() + 100)


def test_edits_reach_siglips_towers(tmp_path: Path) -> None:
    """Masks, gates and tokens in a tower without a class token; a neutral edit changes nothing."""
    clip = dear.load(families.write(families.siglip(), tmp_path))
    plain = clip.encode_image(images())
    n = clip.config.vision.positions
    neutral = Edit({2: LayerEdit(gate=torch.ones(5), mask=torch.zeros(5, n, n))})
    torch.testing.assert_close(clip.visual(images(), neutral), plain)
    gated = Edit({2: LayerEdit(gate=torch.tensor([0.0, 1, 1, 1, 1]))})
    assert (clip.visual(images(), gated) - plain).abs().max() > 1e-3
    see = torch.ones(5, 3, 3, dtype=torch.bool)
    see[:, 0, 1:] = see[:, 1:, 0] = False
    apart = Edit(
        {2: LayerEdit(tokens=torch.randn(2, 40), mask=BlockMask(see)), 3: LayerEdit(mask=BlockMask(see))}, 2
    )
    torch.testing.assert_close(clip.visual(images(), apart), plain, **NEAR)
