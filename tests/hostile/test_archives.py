"""Archives: PyTorch's zip files are the only ones read; no code in them runs and nothing in them grows."""

from __future__ import annotations

import copy
import io
import pickle
import struct
import tarfile
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
    for protocol, reason in ((0, "PUT"), (2, "mkdir"), (5, "FRAME")):
        tree = pickle.dumps(Runs(trap), protocol=protocol)
        refused(repack(archive, tmp_path / "b.pt", {"/data.pkl": tree}), "b.pt", reason)
    for callable_name in ("builtins\neval", "torch\nload", "torch._utils\n_rebuild_qtensor", "os\nsystem"):
        tree = b"\x80\x02c" + callable_name.encode() + b"\nX\x01\x00\x00\x00a\x85R."
        refused(repack(archive, tmp_path / "b.pt", {"/data.pkl": tree}), "b.pt")
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
    refused(repack(archive, tmp_path / "b.pt", {"/data.pkl": tree}), "b.pt")


def test_compressed_tensors_are_refused(archive, model, tmp_path):
    refused(repack(archive, tmp_path / "b.pt", {"/data/0": b"\0" * 50_000_000}, compress=True), "b.pt")
    plain = published.write_state_dict(model, tmp_path / "plain.pt")
    refused(repack(plain, tmp_path / "c.pt", {}, compress=True), "c.pt")


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


# --- what archives are known for elsewhere -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "a/../../escaped", "a\\..\\escaped"])
def test_members_that_would_leave_the_folder_go_nowhere(archive, tmp_path, name):
    """Nothing is ever unpacked to disk: a member's name can only be looked up, never written."""
    home = tmp_path / "a" / "b"
    home.mkdir(parents=True)
    target = home / "x.pt"
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.namelist():
            new.writestr(member, old.read(member))
        new.writestr(name, b"out")
    before = set(tmp_path.rglob("*"))
    read_checkpoint(target)
    assert set(tmp_path.rglob("*")) == before


def test_members_that_are_links_are_only_bytes(archive, tmp_path):
    target = tmp_path / "x.pt"
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.namelist():
            data = old.read(member)
            link = zipfile.ZipInfo(member)
            if member.endswith("/data/0"):
                link.external_attr = 0o120777 << 16  # a symbolic link
                data = b"/etc/passwd"
            new.writestr(link, data)
    refused(target, "x.pt", "TorchScript")


def test_a_tar_is_not_unpacked(tmp_path):
    """PyTorch's oldest format was a tar; links and `..` in one must not reach the disk."""
    target = tmp_path / "in" / "old.pt"
    target.parent.mkdir()
    with tarfile.open(target, "w") as tar:
        for name, kind in (
            ("../escaped", tarfile.REGTYPE),
            ("storages", tarfile.SYMTYPE),
            ("pickle", tarfile.REGTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc"
            tar.addfile(member, io.BytesIO(b""))
    refused(target, "old.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_records_that_share_their_bytes_are_a_bomb(archive, tmp_path):
    """Many entries of the zip's directory on one record: each is stored, together they are far more."""
    with zipfile.ZipFile(archive) as old:
        described = old.read("a/data.pkl")
    target = tmp_path / "x.pt"
    with zipfile.ZipFile(target, "w") as new:
        new.writestr("a/data.pkl", described)
        new.writestr("a/code/x.py", b"")
        new.writestr("a/data/0", b"\0" * 1_000_000)
        first = new.infolist()[-1]
        for number in range(1, 200):
            again = copy.copy(first)
            again.filename = again.orig_filename = f"a/data/{number}"
            new.filelist.append(again)
    refused(target, target.name)


def test_a_program_that_would_unpack_to_gigabytes_is_not_read(archive, tmp_path):
    target = tmp_path / "x.pt"
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.namelist():
            if member.endswith(".py"):
                new.writestr(member, b" " * 70_000_000, zipfile.ZIP_DEFLATED)
            else:
                new.writestr(member, old.read(member))
    refused(target, target.name)
