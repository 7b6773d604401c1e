"""Checkpoints whose tensors or configurations do not fit: each is refused with a sentence that names it."""

from __future__ import annotations

import json

import published
import pytest
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from traps import refused, small_model

from dear.clip.config_huggingface import from_huggingface
from dear.clip.config_openclip import from_openclip
from dear.errors import CheckpointError


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture
def folder(model, tmp_path):
    return published.write_huggingface(model, tmp_path / "checkpoint")


def rewrite(folder, change):
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file)


def test_missing_surplus_and_misshapen_tensors_are_named_with_their_shapes(folder):
    def change(tensors):
        del tensors["vision_model.post_layernorm.bias"]
        tensors["text_model.extra.weight"] = torch.zeros(3)
        tensors["visual_projection.weight"] = torch.zeros(64, 16)
        tensors["logit_scale"] = torch.zeros((), dtype=torch.int64)

    rewrite(folder, change)
    refused(
        folder,
        "model.safetensors",
        "missing vision_model.post_layernorm.bias",
        "surplus text_model.extra.weight",
        "visual_projection.weight is [64, 16], expected [16, 64]",
        "logit_scale is int64",
    )


def test_many_faults_make_one_short_message(folder):
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 30
    (folder / "config.json").write_text(json.dumps(config))
    assert len(refused(folder, "vision_model.encoder.layers.2.", "442")) < 1500
    config["vision_config"]["num_hidden_layers"] = 60_000
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "60001")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_named(folder, value):
    def change(tensors):
        tensors["text_model.final_layer_norm.weight"][3] = value

    rewrite(folder, change)
    refused(folder, "text_model.final_layer_norm.weight")


def test_wrong_layers_in_openais_names_are_named(model, tmp_path):
    state = published.openai_state(model)
    state["visual.transformer.resblocks.1.attn.in_proj_weight"] = torch.zeros(64, 64)
    torch.save(state, tmp_path / "a.pt")
    refused(
        tmp_path / "a.pt",
        "visual.transformer.resblocks.1.attn.in_proj_weight is [64, 64], expected [192, 64]",
    )
    for name in ("visual.conv1.weight", "token_embedding.weight", "transformer.resblocks.0.mlp.c_fc.weight"):
        torch.save({k: v for k, v in published.openai_state(model).items() if k != name}, tmp_path / "b.pt")
        refused(tmp_path / "b.pt", "b.pt", name)


def test_rows_of_a_short_vocabulary_must_exist(folder):
    def change(tensors):
        tensors["text_model.embeddings.token_rows"] = torch.full((40,), 40, dtype=torch.int32)

    rewrite(folder, change)
    refused(folder, "token_rows", "40")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 7),
        ("num_attention_heads", 0),
        ("hidden_size", -64),
        ("hidden_size", 10**12),
        ("hidden_size", "64"),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 10**9),
        ("intermediate_size", 1.5),
        ("image_size", 10**7),
        ("image_size", [8, 9]),
        ("patch_size", 0),
        ("patch_size", 9),
        ("hidden_act", "relu"),
        ("layer_norm_eps", 0),
        ("layer_norm_eps", None),
        ("num_channels", 4),
    ],
)
def test_senseless_numbers_are_refused_before_memory_is_taken(folder, field, value):
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"][field] = value
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "config.json")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"vision_config": 3}',
        '{"a": NaN}',
        "[" * 100_000,
        '{"model_type": "siglip2"}',
        "\x00",
    ],
)
def test_configurations_that_are_none(folder, content):
    (folder / "config.json").write_text(content)
    refused(folder, "config.json")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_HF_KEYS = st.sampled_from(
    ["hidden_size", "num_attention_heads", "image_size", "hidden_act", "eos_token_id", "x"]
)
_OPEN_KEYS = st.sampled_from(
    ["width", "layers", "heads", "head_width", "mlp_ratio", "image_size", "pool_type"]
)


@given(st.dictionaries(_HF_KEYS, _JSON), st.dictionaries(_HF_KEYS, _JSON), _JSON, _JSON)
def test_any_hugging_face_configuration_is_read_or_refused(vision, text, dim, mean):
    try:
        from_huggingface(
            {"vision_config": vision, "text_config": text, "projection_dim": dim},
            {"image_mean": mean},
            "c.json",
        )
    except CheckpointError as error:
        assert str(error).startswith("c.json")  # noqa: PT017


@example(vision={}, text={"pool_type": []}, quick=False, mean=None)
@given(st.dictionaries(_OPEN_KEYS, _JSON), st.dictionaries(_OPEN_KEYS, _JSON), _JSON, _JSON)
def test_any_openclip_configuration_is_read_or_refused(vision, text, quick, mean):
    raw = {"embed_dim": 8, "vision_cfg": vision, "text_cfg": text, "quick_gelu": quick}
    try:
        from_openclip({"model_cfg": raw, "preprocess_cfg": {"mean": mean}}, "c.json")
    except CheckpointError as error:
        assert str(error).startswith("c.json")  # noqa: PT017


def test_a_text_file_called_pt(tmp_path):
    (tmp_path / "ViT-B-16.pt").write_text("<html>404 Not Found</html>")
    refused(tmp_path / "ViT-B-16.pt", "ViT-B-16.pt")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    refused(tmp_path / "empty.safetensors", "empty.safetensors")
