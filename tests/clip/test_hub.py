"""Downloads against a hub on this machine: checked, resumed, whole or not at all, offline once cached."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from fake_hub import FakeHub

import dear
from dear.clip import hub
from dear.clip.checkpoint import save_hf
from dear.clip.config import ClipConfig, TextConfig, VisionConfig
from dear.clip.model import Clip
from dear.errors import CheckpointError

NAME = "someone/tiny-clip"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny model as a hub would hold it, with files nobody needs."""
    torch.manual_seed(0)
    vision = VisionConfig(width=64, layers=2, heads=1, image_size=16, patch_size=8)
    clip = Clip(ClipConfig(vision, TextConfig(width=64, layers=1, heads=1, vocab=99, context=8), 8))
    folder = tmp_path_factory.mktemp("repository")
    save_hf(clip, folder)
    (folder / "README.md").write_text("a model")
    (folder / "flax_model.msgpack").write_bytes(b"x" * 1000)
    return folder, clip.fingerprint


@pytest.fixture
def server(files, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    server = FakeHub(NAME, files[0])
    yield server
    server.close()


def fetch(server, tmp_path):
    return hub.fetch(NAME, cache_dir=tmp_path, endpoint=server.endpoint)


def blobs(tmp_path):
    return sorted(path for path in tmp_path.rglob("*") if path.is_file() and "blobs" in path.parts)


def test_only_what_is_needed_is_downloaded_and_then_never_asked_for_again(server, files, tmp_path):
    folder = fetch(server, tmp_path)
    assert dear.load(folder).fingerprint == files[1]
    got = sorted(path.name for path in folder.iterdir())
    assert got == ["config.json", "model.safetensors", "preprocessor_config.json"]
    before = len(server.requests)
    assert fetch(server, tmp_path) == folder
    assert len(server.requests) == before


def test_offline_works_once_it_is_cached(server, files, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        fetch(server, tmp_path)
    assert not server.requests
    monkeypatch.delenv("HF_HUB_OFFLINE")
    fetch(server, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    server.down = True
    assert dear.load(fetch(server, tmp_path)).fingerprint == files[1]


def test_a_cut_transfer_resumes_where_it_broke(server, files, tmp_path, monkeypatch):
    from huggingface_hub import constants

    # A transfer resumes after the last whole chunk.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    server.cut["model.safetensors"] = 50_000
    assert dear.load(fetch(server, tmp_path)).fingerprint == files[1]
    assert server.transfers("model.safetensors") == [None, "bytes=50000-"]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_damaged_on_the_way_is_not_kept(server, files, tmp_path, file):
    server.corrupt.add(file)
    with pytest.raises(CheckpointError, match=file):
        fetch(server, tmp_path)
    damaged = server.checksum(file)
    assert not [path for path in blobs(tmp_path) if path.name.startswith(damaged)]
    server.corrupt.clear()
    assert dear.load(fetch(server, tmp_path)).fingerprint == files[1]


def test_a_revision_is_pinned(server, files, tmp_path):
    commit = fetch(server, tmp_path).name
    pinned = hub.fetch(f"{NAME}@{commit}", cache_dir=tmp_path / "other", endpoint=server.endpoint)
    assert pinned.name == commit
    before = len(server.requests)
    assert hub.fetch(f"{NAME}@{commit}", cache_dir=tmp_path / "other", endpoint=server.endpoint) == pinned
    assert len(server.requests) == before
    with pytest.raises(CheckpointError, match="no-such-branch"):
        hub.fetch(f"{NAME}@no-such-branch", cache_dir=tmp_path / "third", endpoint=server.endpoint)


def test_an_interrupted_set_of_files_is_completed(server, files, tmp_path):
    folder = fetch(server, tmp_path)
    (folder / "model.safetensors").resolve().unlink()
    (folder / "model.safetensors").unlink()
    assert dear.load(fetch(server, tmp_path)).fingerprint == files[1]
    assert len(server.transfers("config.json")) == 1


def test_a_hub_that_does_not_answer_is_named_with_a_way_out(server, tmp_path):
    server.down = True
    with pytest.raises(CheckpointError, match=NAME):
        fetch(server, tmp_path)
    with pytest.raises(CheckpointError, match=NAME):
        hub.fetch(NAME, cache_dir=tmp_path, endpoint="http://127.0.0.1:9")
    assert not blobs(tmp_path)


def test_a_model_that_does_not_exist(server, tmp_path):
    with pytest.raises(CheckpointError, match="someone/else"):
        hub.fetch("someone/else", cache_dir=tmp_path, endpoint=server.endpoint)


def test_a_repository_without_a_clip(tmp_path, server):
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "repo" / "model.safetensors").write_bytes(b"never asked for")
    other = FakeHub("someone/bert", tmp_path / "repo")
    with pytest.raises(CheckpointError, match="someone/bert"):
        hub.fetch("someone/bert", cache_dir=tmp_path / "cache", endpoint=other.endpoint)
    assert not other.transfers("model.safetensors")
    other.close()


def test_the_environment_is_honored_through_dear_load(server, files, tmp_path):
    program = f"import dear; print(dear.load({NAME!r}).fingerprint)"
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.endpoint,
        "HF_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    for offline in ("0", "1"):
        if offline == "1":
            server.close()
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment | {"HF_HUB_OFFLINE": offline},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == files[1], done.stderr


def test_a_siglip_comes_with_its_tokenizer(tmp_path, monkeypatch):
    import families

    folder = families.write(families.siglip(), tmp_path / "siglip")
    for name in ("tokenizer.json", "tokenizer_config.json", "spiece.model", "README.md"):
        (folder / name).write_text("{}")
    server = FakeHub(NAME, folder)
    try:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        got = hub.fetch(NAME, cache_dir=tmp_path / "cache", endpoint=server.endpoint)
        names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        assert sorted(path.name for path in got.iterdir()) == names
    finally:
        server.close()
