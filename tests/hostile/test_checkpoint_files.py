"""Checkpoint files made to mislead, crash or run code: each is refused with a sentence that names it."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile

import published
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dear
from dear.clip.archive import read_archive
from dear.clip.checkpoint import read_checkpoint
from dear.clip.configfiles import from_huggingface, from_openclip
from dear.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

TEXT = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}
TEXT |= {"vocab_size": 40, "eos_token_id": 39, "max_position_embeddings": 6}
VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 64}
VISION |= {"image_size": 8, "patch_size": 4}


@pytest.fixture(scope="module")
def model():
    return published.random_model(VISION, TEXT, 16)


@pytest.fixture
def folder(model, tmp_path):
    return published.write_huggingface(model, tmp_path / "checkpoint")


class Runs:
    """Unpickling this would make a folder; the folder must never be there."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def refused(source, *parts):
    with pytest.raises(CheckpointError) as caught:
        dear.load(source)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


def rewrite(folder, change):
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file)


# --- tensors that do not fit -------------------------------------------------------------------------------


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
    assert len(refused(folder, "missing vision_model.encoder.layers.2.", "and 442 more")) < 1500
    config["vision_config"]["num_hidden_layers"] = 60_000
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "asks for 60001 layers")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_named(folder, value):
    def change(tensors):
        tensors["text_model.final_layer_norm.weight"][3] = value

    rewrite(folder, change)
    refused(folder, "text_model.final_layer_norm.weight", "NaN or infinity")


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
        refused(tmp_path / "b.pt", "b.pt", f"missing {name}")


def test_rows_of_a_short_vocabulary_must_exist(folder):
    def change(tensors):
        tensors["text_model.embeddings.token_rows"] = torch.full((40,), 40, dtype=torch.int32)

    rewrite(folder, change)
    refused(folder, "token_rows points at rows 40 to 40")


# --- configurations ----------------------------------------------------------------------------------------


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
        ("hidden_act", "gelu_new"),
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
        '{"model_type": "siglip"}',
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


@given(st.dictionaries(_OPEN_KEYS, _JSON), st.dictionaries(_OPEN_KEYS, _JSON), _JSON, _JSON)
def test_any_openclip_configuration_is_read_or_refused(vision, text, quick, mean):
    raw = {"embed_dim": 8, "vision_cfg": vision, "text_cfg": text, "quick_gelu": quick}
    try:
        from_openclip({"model_cfg": raw, "preprocess_cfg": {"mean": mean}}, "c.json")
    except CheckpointError as error:
        assert str(error).startswith("c.json")  # noqa: PT017


# --- safetensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 3, 8, 200, -1])
def test_truncated_safetensors(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, "model.safetensors")


@pytest.mark.parametrize("length", [0, 7, 2**31, 2**63, 2**64 - 1])
def test_a_wrong_header_length(folder, length):
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    refused(folder, "model.safetensors")


def test_offsets_that_lie(folder):
    file = folder / "model.safetensors"
    header = json.dumps(
        {"logit_scale": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    ).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    refused(folder, "model.safetensors")


def test_an_index_may_not_leave_its_folder(folder, tmp_path):
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    index = folder / "model.safetensors.index.json"
    for name in ("../outside.safetensors", str(outside), "model.safetensors.index.json", "", "a\\b"):
        index.write_text(json.dumps({"weight_map": {"logit_scale": name}}))
        refused(folder, "index.json", "not in its own folder")
    index.write_text(json.dumps({"weight_map": {"logit_scale": "gone.safetensors"}}))
    refused(folder, "gone.safetensors is missing")
    index.write_text(json.dumps({"weight_map": []}))
    refused(folder, "no weight_map")


# --- pickles -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_that_would_run_code_does_not(model, folder, tmp_path):
    trap = tmp_path / "ran"
    state = {**published.openai_state(model), "extra": Runs(trap)}
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Runs(trap)))
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    for source in (tmp_path / "new.pt", tmp_path / "old.pt", tmp_path / "raw.pt", folder):
        refused(source, "run code")
    assert not trap.exists()


@pytest.mark.parametrize("keep", [0, 1, 100, 5000, -10])
def test_truncated_pickles(model, tmp_path, keep):
    file = published.write_state_dict(model, tmp_path / "a.pt")
    file.write_bytes(file.read_bytes()[:keep])
    refused(file, "a.pt")


def test_pickles_without_a_state_dict(tmp_path):
    for value in ([1, 2], {}, {"a": 1}, torch.zeros(3), {"weights": torch.zeros(3)}):
        torch.save(value, tmp_path / "a.pt")
        refused(tmp_path / "a.pt", "a.pt")


def test_tensors_that_claim_more_than_the_file_holds(model, tmp_path):
    state = published.openai_state(model)
    state["token_embedding.weight"] = torch.zeros(1).expand(10_000_000, 64)
    torch.save(state, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "claims more numbers")


# --- TorchScript archives ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def archive(model, tmp_path_factory):
    return published.write_torchscript(model, tmp_path_factory.mktemp("archive") / "a.pt")


def repack(source, target, replaced, compress=False):
    """Copy a zip, with some records replaced (by the end of their name)."""
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", kind) as new:
        for name in old.namelist():
            record = next((data for end, data in replaced.items() if name.endswith(end)), old.read(name))
            new.writestr(name, record)
    return target


def test_an_archives_program_is_never_run(archive, model, tmp_path):
    expected = published.openai_state(model)
    with zipfile.ZipFile(archive) as file:
        programs = [name for name in file.namelist() if name.endswith(".py")]
    spoiled = repack(archive, tmp_path / "b.pt", dict.fromkeys(programs, b"import os\nthis is not a program"))
    tensors = read_archive(spoiled).tensors
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_an_archive_whose_tree_would_run_code_is_refused(archive, tmp_path):
    trap = tmp_path / "ran"
    for protocol, reason in ((0, "PUT"), (2, "mkdir, which no CLIP archive needs"), (5, "FRAME")):
        tree = pickle.dumps(Runs(trap), protocol=protocol)
        refused(repack(archive, tmp_path / "b.pt", {"/data.pkl": tree}), "b.pt", reason)
    for callable_name in ("builtins\neval", "torch\nload", "torch._utils\n_rebuild_qtensor", "os\nsystem"):
        tree = b"\x80\x02c" + callable_name.encode() + b"\nX\x01\x00\x00\x00a\x85R."
        refused(repack(archive, tmp_path / "b.pt", {"/data.pkl": tree}), "no CLIP archive needs")
    assert not trap.exists()


def _tree(offset, size, stride, key="0", kind=b"FloatStorage", state=b""):
    """A module `M` with one tensor `t`, written opcode by opcode."""
    out = io.BytesIO()
    out.write(b"\x80\x02c__torch__\nM\n)\x81}X\x01\x00\x00\x00tctorch._utils\n_rebuild_tensor_v2\n(")
    out.write(b"(X\x07\x00\x00\x00storagectorch\n" + kind + b"\n")
    out.write(b"X" + struct.pack("<I", len(key)) + key.encode() + b"X\x03\x00\x00\x00cpuK\x01tQ")
    for value in (offset, size, stride):
        out.write(pickle.dumps(value, protocol=2)[2:-1])
    out.write(b"\x89NtR" + state + b"sb.")
    return out.getvalue()


@pytest.mark.parametrize(
    "tree",
    [
        _tree(0, (10**9,), (1,)),
        _tree(10**9, (1,), (1,)),
        _tree(-1, (1,), (1,)),
        _tree(0, (2, 2), (1,)),
        _tree(0, (10**9,), (0,)),
        _tree(0, (2**62, 2**62), (1, 1)),
        _tree(0, ("a",), (1,)),
        _tree(0, (1,), (-1,)),
        _tree(0, (1,), (1,), key="../version"),
        _tree(0, (1,), (1,), key="999"),
        _tree(0, (1,), (1,), kind=b"StringStorage"),
        _tree(0, (1,), (1,), state=b"}X\x01\x00\x00\x00aK\x01sb"),
        b"",
        b".",
        b"\x80\x02N.",
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02]q\x00h\x00a.",
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x05\x96\xff\xff\xff\xff\x00\x00\x00\x00.",
    ],
)
def test_archives_whose_tree_is_described_wrongly(archive, tmp_path, tree):
    refused(repack(archive, tmp_path / "b.pt", {"/data.pkl": tree}), "b.pt")


def test_a_well_described_tree_is_read(archive, tmp_path):
    tensors = read_archive(repack(archive, tmp_path / "b.pt", {"/data.pkl": _tree(0, (1,), (1,))})).tensors
    assert tensors["t"].shape == (1,)


def test_modules_that_contain_themselves_end(archive, tmp_path):
    tree = b"\x80\x02c__torch__\nM\n)\x81q\x00}(X\x01\x00\x00\x00ah\x00X\x01\x00\x00\x00bh\x00ub."
    refused(repack(archive, tmp_path / "b.pt", {"/data.pkl": tree}), "modules are more, or deeper")


def test_compressed_tensors_are_refused(archive, model, tmp_path):
    refused(repack(archive, tmp_path / "b.pt", {"/data/0": b"\0" * 50_000_000}, compress=True), "compressed")
    plain = published.write_state_dict(model, tmp_path / "plain.pt")
    refused(repack(plain, tmp_path / "c.pt", {}, compress=True), "compressed")


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_cut_archives(archive, tmp_path, keep):
    data = archive.read_bytes()
    (tmp_path / "b.pt").write_bytes(data[: int(len(data) * keep)])
    refused(tmp_path / "b.pt", "b.pt")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_any_damage_to_a_file_is_read_or_refused(model, folder, place, byte):
    """One byte changed anywhere in a header: an answer or a CheckpointError, never another exception."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    data[int(place * end)] = byte
    damaged = folder / "damaged.safetensors"
    damaged.write_bytes(data)
    try:
        read_checkpoint(damaged)
    except CheckpointError as error:
        assert "damaged.safetensors" in str(error)  # noqa: PT017


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_any_damage_to_an_archives_tree_is_read_or_refused(archive, tmp_path, place, byte):
    with zipfile.ZipFile(archive) as file:
        tree = bytearray(file.read("a/data.pkl"))
    tree[int(place * len(tree))] = byte
    try:
        read_checkpoint(repack(archive, tmp_path / "b.pt", {"/data.pkl": bytes(tree)}))
    except CheckpointError as error:
        assert "b.pt" in str(error)  # noqa: PT017


def test_a_text_file_called_pt(tmp_path):
    (tmp_path / "ViT-B-16.pt").write_text("<html>404 Not Found</html>")
    refused(tmp_path / "ViT-B-16.pt", "ViT-B-16.pt")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    refused(tmp_path / "empty.safetensors", "empty.safetensors")
