"""Archives: PyTorch's zip files are the only ones read; no code in them runs and nothing in them grows."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile

import published
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traps import Runs, refused, repack, small_model

from dear.clip.archive import read_archive
from dear.clip.checkpoint import read_checkpoint
from dear.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def archive(model, tmp_path_factory):
    return published.write_torchscript(model, tmp_path_factory.mktemp("archive") / "a.pt")


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
def test_any_damage_to_an_archives_tree_is_read_or_refused(archive, tmp_path, place, byte):
    with zipfile.ZipFile(archive) as file:
        tree = bytearray(file.read("a/data.pkl"))
    tree[int(place * len(tree))] = byte
    try:
        read_checkpoint(repack(archive, tmp_path / "b.pt", {"/data.pkl": bytes(tree)}))
    except CheckpointError as error:
        assert "b.pt" in str(error)  # noqa: PT017
