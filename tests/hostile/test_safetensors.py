"""safetensors files whose headers lie."""

from __future__ import annotations

import json
import struct

import published
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traps import refused, small_model

from dear.clip.checkpoint import read_checkpoint
from dear.errors import CheckpointError


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture
def folder(model, tmp_path):
    return published.write_huggingface(model, tmp_path / "checkpoint")


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
    for name in (
        "../outside.safetensors",
        str(outside),
        "model.safetensors.index.json",
        "",
        "a\\b",
        "x" * 5000,
    ):
        index.write_text(json.dumps({"weight_map": {"logit_scale": name}}))
        refused(folder, "index.json")
    index.write_text(json.dumps({"weight_map": {"logit_scale": "gone.safetensors"}}))
    refused(folder, "gone.safetensors")
    index.write_text(json.dumps({"weight_map": []}))
    refused(folder, "weight_map")


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


def lying(folder, header: dict, body: bytes = b"\0" * 64) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
        | {"b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}},  # overlapping
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
        | {"b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},  # the same bytes twice
        {"a": {"dtype": "F32", "shape": [8], "data_offsets": [32, 64]}},  # a hole before it
        {"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}},  # bytes that nobody owns
        {"a": {"dtype": "F32", "shape": [16], "data_offsets": [64, 0]}},  # backwards
        {"a": {"dtype": "F32", "shape": [15], "data_offsets": [0, 64]}},  # shape and bytes differ
        {"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 64]}},  # 2^64 numbers
        {"a": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}},
        {"a": {"dtype": "F32", "shape": [-16], "data_offsets": [0, 64]}},
        {"a": {"dtype": "F33", "shape": [16], "data_offsets": [0, 64]}},
        {"a": {"dtype": "F8_E4M3", "shape": [64], "data_offsets": [0, 64]}},
        {"a": {"dtype": "F4", "shape": [128], "data_offsets": [0, 64]}},
        {"a": {"dtype": "C64", "shape": [8], "data_offsets": [0, 64]}},
        {"a": {"dtype": "F32", "shape": [1] * 1000, "data_offsets": [0, 4]}},
        {"__metadata__": {"a": 1}},
        {"__metadata__": []},
        {"a": []},
        [],
    ],
)
def test_headers_that_lie_about_places_shapes_and_kinds(folder, header):
    lying(folder, header)
    refused(folder, "model.safetensors")


def test_a_header_of_a_hundred_megabytes_is_not_read(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 200_000_000) + b"{" + b" " * 1000)
    refused(folder, "model.safetensors")


def test_names_that_stand_twice(folder):
    entry = '"logit_scale": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}'
    text = ("{" + entry + ", " + entry + "}").encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 64)
    refused(folder, "model.safetensors", "'logit_scale'")
