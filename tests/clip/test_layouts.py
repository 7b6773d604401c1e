"""SigLIP and PE-Core in OpenCLIP's layout with timm's towers, and PE-Core's own file; renamed by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import plain
import pytest
import safetensors.torch
import torch
from other_families import PERCEPTION, SIGLIP, model
from torch import Tensor

import dear
from dear.clip import Clip, config_openclip
from dear.errors import CheckpointError

BLOCK = {"ln_1": "norm1", "ln_2": "norm2", "attn.o": "attn.proj", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
OPENAI = {
    "ln_1": "ln_1",
    "ln_2": "ln_2",
    "attn.o": "attn.out_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
PART = ("weight", "bias")


def blocks(state: dict[str, Tensor], ours: str, theirs: str, layers: int, names: dict[str, str], packed: str):
    out = {}
    for i in range(layers):
        for name, other in names.items():
            for part in PART:
                out[f"{theirs}.{i}.{other}.{part}"] = state[f"{ours}.{i}.{name}.{part}"]
        for part in PART:
            rows = [state[f"{ours}.{i}.attn.{name}.{part}"] for name in "qkv"]
            out[f"{theirs}.{i}.{packed.format(part)}"] = torch.cat(rows)
    return out


def text_part(clip: Clip, at: str) -> dict[str, Tensor]:
    state, text = clip.state_dict(), clip.config.text
    out = {
        f"{at}token_embedding.weight": state["text.tokens"],
        f"{at}positional_embedding": state["text.positions"],
        **{f"{at}ln_final.{part}": state[f"text.ln_final.{part}"] for part in PART},
        **blocks(state, "text.blocks", f"{at}transformer.resblocks", text.layers, OPENAI, "attn.in_proj_{}"),
        "logit_scale": state["log_scale"],
    }
    if text.projection_bias:
        out[f"{at}text_projection.weight"] = state["text.proj"].T
        out[f"{at}text_projection.bias"] = state["text.proj_bias"]
    else:
        out[f"{at}text_projection"] = state["text.proj"]
    if "pair_bias" in state:
        out["logit_bias"] = state["pair_bias"]
    return out


def timm(clip: Clip) -> dict[str, Tensor]:
    state, vision, at = clip.state_dict(), clip.config.vision, "visual.trunk."
    out = text_part(clip, "text.")
    out |= blocks(state, "visual.blocks", f"{at}blocks", vision.layers, BLOCK, "attn.qkv.{}")
    out[f"{at}patch_embed.proj.weight"] = state["visual.patch.weight"]
    out[f"{at}pos_embed"] = state["visual.positions"][None]
    if vision.patch_bias:
        out[f"{at}patch_embed.proj.bias"] = state["visual.patch.bias"]
    if vision.class_token:
        out[f"{at}cls_token"] = state["visual.class_token"][None, None]
    for part in PART:
        out[f"{at}norm.{part}"] = state[f"visual.ln_post.{part}"]
        if vision.pre_norm:
            out[f"{at}norm_pre.{part}"] = state[f"visual.ln_pre.{part}"]
        pool, theirs = "visual.pool.", f"{at}attn_pool."
        out[f"{theirs}q.{part}"] = state[f"{pool}attn.q.{part}"]
        out[f"{theirs}kv.{part}"] = torch.cat([state[f"{pool}attn.{name}.{part}"] for name in "kv"])
        out[f"{theirs}proj.{part}"] = state[f"{pool}attn.o.{part}"]
        out[f"{theirs}norm.{part}"] = state[f"{pool}norm.{part}"]
        out[f"{theirs}mlp.fc1.{part}"] = state[f"{pool}mlp.up.{part}"]
        out[f"{theirs}mlp.fc2.{part}"] = state[f"{pool}mlp.down.{part}"]
    out[f"{at}attn_pool.latent"] = state["visual.pool.probe"][None, None]
    if vision.projection:
        out[f"{at}head.weight"] = state["visual.proj"].T
        out[f"{at}head.bias"] = state["visual.proj_bias"]
    return {name: tensor.contiguous() for name, tensor in out.items()}


def perception(clip: Clip) -> dict[str, Tensor]:
    state, vision = clip.state_dict(), clip.config.vision
    out = text_part(clip, "")
    layers = "visual.transformer.resblocks"
    out |= blocks(state, "visual.blocks", layers, vision.layers, OPENAI, "attn.in_proj_{}")
    out["visual.conv1.weight"] = state["visual.patch.weight"]
    out["visual.class_embedding"] = state["visual.class_token"]
    out["visual.positional_embedding"] = state["visual.positions"]
    out["visual.proj"] = state["visual.proj"]
    out["visual.attn_pool.probe"] = state["visual.pool.probe"][None, None]
    for part in PART:
        out[f"visual.ln_pre.{part}"] = state[f"visual.ln_pre.{part}"]
        out[f"visual.ln_post.{part}"] = state[f"visual.ln_post.{part}"]
        rows = [state[f"visual.pool.attn.{name}.{part}"] for name in "qkv"]
        out[f"visual.attn_pool.attn.in_proj_{part}"] = torch.cat(rows)
        out[f"visual.attn_pool.attn.out_proj.{part}"] = state[f"visual.pool.attn.o.{part}"]
        out[f"visual.attn_pool.layernorm.{part}"] = state[f"visual.pool.norm.{part}"]
        out[f"visual.attn_pool.mlp.c_fc.{part}"] = state[f"visual.pool.mlp.up.{part}"]
        out[f"visual.attn_pool.mlp.c_proj.{part}"] = state[f"visual.pool.mlp.down.{part}"]
    return out


def open_clip_config(clip: Clip, name: str, proj: str | None) -> dict:
    text = clip.config.text
    fields = {
        "context_length": text.context, "vocab_size": text.vocab, "width": text.width, "heads": text.heads,
        "layers": text.layers, "proj_bias": text.projection_bias, "norm_kwargs": {"eps": text.eps},
    }  # fmt: skip
    if not text.causal:
        fields |= {"no_causal_mask": True, "pool_type": "last", "hf_tokenizer_name": "some/tokenizer"}
        fields |= {"tokenizer_kwargs": {"clean": "canonicalize"}, "act_kwargs": {"approximate": "tanh"}}
    size = clip.config.vision.image_size
    vision = {"image_size": size, "timm_model_name": name, "timm_pool": "map", "timm_proj": proj}
    extra = {"init_logit_bias": -10} if clip.config.logit_bias else {}
    return {
        "model_cfg": {"embed_dim": clip.config.embed_dim, "vision_cfg": vision, "text_cfg": fields, **extra}
    }


def write(folder: Path, state: dict[str, Tensor], config: dict) -> Path:
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(state, folder / "open_clip_model.safetensors")
    return folder


@pytest.fixture
def siglip(monkeypatch: pytest.MonkeyPatch) -> tuple[Clip, dict]:
    monkeypatch.setitem(config_openclip._SIGLIP_SIZES, "base", (36, 6, 4, 144))
    # timm's patch 32 towers have the tanh approximation; the patch size is part of the name
    shape = replace(SIGLIP, vision=replace(SIGLIP.vision, patch_size=32, image_size=70))
    clip = model(shape, torch.float32)
    return clip, open_clip_config(clip, "vit_base_patch32_siglip_256", "none")


def same_features(one: Clip, other: Clip) -> None:
    size = one.config.vision.image_size
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(3, 39, (3, one.config.text.context), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = one.config.text.vocab - 1
    torch.testing.assert_close(one.encode_image(pixels), other.encode_image(pixels))
    torch.testing.assert_close(one.encode_text(ids), other.encode_text(ids))


def test_siglip_in_openclips_layout(siglip: tuple[Clip, dict], tmp_path: Path) -> None:
    clip, config = siglip
    loaded = dear.load(write(tmp_path, timm(clip), config))
    assert replace(loaded.config.vision, pool_heads=4) == clip.config.vision
    same_features(loaded, clip)
    assert loaded.tokenizer is None


def test_pe_core_in_openclips_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(config_openclip._PERCEPTION_SIZES, "base", (32, 6, 4, 128))
    vision = replace(PERCEPTION.vision, pool_heads=8, projection_bias=True)
    clip = model(replace(PERCEPTION, vision=vision), torch.float32)
    config = open_clip_config(clip, "vit_pe_core_base_patch8_24", None)
    same_features(dear.load(write(tmp_path, timm(clip), config)), clip)


def test_pe_cores_own_file(tmp_path: Path) -> None:
    vision = replace(PERCEPTION.vision, width=128, heads=2, pool_heads=8, mlp=200)
    text = replace(PERCEPTION.text, width=64, heads=1, mlp=100)
    clip = model(replace(PERCEPTION, vision=vision, text=text), torch.float32)
    torch.save(perception(clip), tmp_path / "PE-Core.pt")
    loaded = dear.load(tmp_path / "PE-Core.pt")
    assert loaded.config.vision == vision
    assert (loaded.config.resize, loaded.config.interpolation) == ("squash", "bilinear")
    same_features(loaded, clip)
    assert loaded.tokenize(["a cat"]).shape == (1, 32)


def test_rotary_positions_and_pooling_equal_the_plain_loop() -> None:
    clip = model(PERCEPTION)
    config, w = clip.config.vision, {name: t.numpy() for name, t in clip.state_dict().items()}
    pixels = torch.randn(2, 3, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = np.stack([loop_feature(image.numpy(), w, config) for image in pixels])
    np.testing.assert_allclose(clip.encode_image(pixels).numpy(), expected, rtol=1e-6, atol=1e-7)


def turned(row: np.ndarray, place: int, config, heads: int) -> np.ndarray:
    """A row of q or k with every pair of channels turned: a head's first half by column, second by row."""
    if place == 0:
        return row
    down, across = divmod(place - 1, config.side)
    row, width = row.copy(), config.head_width
    for h in range(heads):
        for pair in range(width // 2):
            axis = across if pair < width // 4 else down
            step = pair % (width // 4)
            angle = (axis + 1) * 10_000 ** (-2 * step / (width // 2))
            i = h * width + 2 * pair
            a, b = row[i], row[i + 1]
            row[i] = a * math.cos(angle) - b * math.sin(angle)
            row[i + 1] = b * math.cos(angle) + a * math.sin(angle)
    return row


def loop_feature(pixels: np.ndarray, w: dict[str, np.ndarray], config) -> np.ndarray:
    """One image, one head, one query at a time."""
    x = plain.embed_image(pixels, w, config)
    for layer in range(config.layers):
        at = f"visual.blocks.{layer}"
        y = plain.layer_norm(x, w[f"{at}.ln_1.weight"], w[f"{at}.ln_1.bias"], config.eps)
        q, k, v = (y @ w[f"{at}.attn.{n}.weight"].T + w[f"{at}.attn.{n}.bias"] for n in "qkv")
        q = np.stack([turned(row, i, config, config.heads) for i, row in enumerate(q)])
        k = np.stack([turned(row, i, config, config.heads) for i, row in enumerate(k)])
        z = attend(q, k, v, config.heads)
        x = x + z @ w[f"{at}.attn.o.weight"].T + w[f"{at}.attn.o.bias"]
        h = plain.layer_norm(x, w[f"{at}.ln_2.weight"], w[f"{at}.ln_2.bias"], config.eps)
        x = x + mlp(h, w, f"{at}.mlp", config.activation)
    y = plain.layer_norm(x, w["visual.ln_post.weight"], w["visual.ln_post.bias"], config.eps)
    at = "visual.pool"
    q = w[f"{at}.probe"][None] @ w[f"{at}.attn.q.weight"].T + w[f"{at}.attn.q.bias"]
    k, v = (y @ w[f"{at}.attn.{n}.weight"].T + w[f"{at}.attn.{n}.bias"] for n in "kv")
    z = attend(q, k, v, config.pool_heads) @ w[f"{at}.attn.o.weight"].T + w[f"{at}.attn.o.bias"]
    h = plain.layer_norm(z, w[f"{at}.norm.weight"], w[f"{at}.norm.bias"], config.eps)
    return (z + mlp(h, w, f"{at}.mlp", config.activation))[0] @ w["visual.proj"]


def attend(q, k, v, heads):
    out, width = np.zeros((len(q), q.shape[1])), q.shape[1] // heads
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        for i in range(len(q)):
            scores = np.array([q[i, part] @ k[j, part] / math.sqrt(width) for j in range(len(k))])
            weights = np.exp(scores - scores.max())
            out[i, part] = (weights / weights.sum()) @ v[:, part]
    return out


def mlp(x, w, at, activation):
    h = plain.activation(x @ w[f"{at}.up.weight"].T + w[f"{at}.up.bias"], activation)
    return h @ w[f"{at}.down.weight"].T + w[f"{at}.down.bias"]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("visual.trunk.attn_pool.latent", None, r"visual\.trunk\.attn_pool\.latent"),
        (
            "visual.trunk.attn_pool.kv.weight",
            torch.zeros(36, 36),
            r"kv\.weight .*\[36, 36\].*\[72, 36\]",
        ),
        ("logit_bias", torch.tensor(float("nan")), "logit_bias.*NaN"),
        ("visual.trunk.pos_embed", torch.zeros(1, 5, 36), r"pos_embed .*\[1, 5, 36\]"),
        ("visual.trunk.norm_pre.weight", torch.zeros(36), r"visual\.trunk\.norm_pre\.weight"),
        ("text.text_projection.bias", torch.zeros(36, dtype=torch.int64), r"text_projection\.bias .*int64"),
    ],
)
def test_wrong_tensors_are_named(
    siglip, tmp_path: Path, name: str, change: Tensor | None, words: str
) -> None:
    clip, config = siglip
    state = timm(clip)
    state.pop(name, None)
    with pytest.raises(CheckpointError, match=words):
        dear.load(write(tmp_path, state if change is None else {**state, name: change}, config))


def test_timm_tensors_need_their_configuration(siglip, tmp_path: Path) -> None:
    safetensors.torch.save_file(timm(siglip[0]), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"open_clip_config\.json"):
        dear.load(tmp_path / "model.safetensors")
