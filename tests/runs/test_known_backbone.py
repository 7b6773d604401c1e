"""Fingerprints of a backbone's files are kept between processes, while the files stay as they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import dear
from dear.clip import factory, model
from dear.errors import RunError
from dear.runs.folder import load_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    shutil.copytree(factory.EMBEDDED / "mini", tmp_path / "clip")
    fitted = dear.Classifier(
        method="zeroshot", backbone=str(tmp_path / "clip"), template="a {} thing", shots=1, calibrate=False
    )
    fitted.fit("world:textures").save(tmp_path / "run")
    return tmp_path / "run"


def test_files_that_did_not_change_are_not_hashed_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_run(run).clip

    def refuse(*_: object) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr(model.WeightDigests, "of", refuse)
    again = load_run(run).clip
    assert (again.fingerprint, again.identity) == (first.fingerprint, first.identity)


def test_other_weights_of_the_same_size_and_time_are_noticed(run: Path) -> None:
    load_run(run)
    file = next((run.parent / "clip").glob("*.safetensors"))
    before, tensors = file.stat(), load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.dim() == 2)
    save_file({**tensors, name: tensors[name] * 1.5}, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(RunError, match="sha256"):
        load_run(run)


def test_a_damaged_cache_is_ignored(run: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(exist_ok=True)
    for text in ("{", "[]", '{"a": 1}'):
        (tmp_path / "cache" / "fingerprints.json").write_text(text)
        assert load_run(run).clip.identity.startswith("sha256:")
