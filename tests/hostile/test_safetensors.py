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
    for name in ("../outside.safetensors", str(outside), "model.safetensors.index.json", "", "a\\b"):
        index.write_text(json.dumps({"weight_map": {"logit_scale": name}}))
        refused(folder, "index.json", "not in its own folder")
    index.write_text(json.dumps({"weight_map": {"logit_scale": "gone.safetensors"}}))
    refused(folder, "gone.safetensors is missing")
    index.write_text(json.dumps({"weight_map": []}))
    refused(folder, "no weight_map")


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
