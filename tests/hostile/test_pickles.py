"""Pickles in every place where a file is read: none is ever run, and each is refused with a sentence."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path

import published
import pytest
import readers
import torch
from PIL import Image
from tiny import Colors, mixed_roles, tiny_clip, token_ids
from traps import Runs, pickles, refused, small_model

import dear
from dear.bench.store import read_cell
from dear.data import open_data
from dear.errors import DearError, InputError
from dear.heads.sentences import sentence_embedder
from dear.methods import DeAR
from dear.runs.recipe import Recipe
from dear.studio.classify import open_uploads
from dear.train.run import Paused, train

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch warns of pickle protocols

# What an exported model says of itself comes out of the ONNX file, which is tried as a whole.
PLACES = [name for name in readers.NAMES if name != "onnx-description"]


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.mark.parametrize("place", PLACES)
def test_no_reader_runs_a_pickle(place: str, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    target = readers.find(place)(tmp_path)
    for name, data in pickles(trap).items():
        with contextlib.suppress(DearError):  # the oldest pickles are plain text, and a corpus may be any
            target.read(data)
        assert not trap.exists(), name


def test_a_checkpoint_with_a_pickle_beside_its_tensors_stays_shut(model, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    folder = published.write_huggingface(model, tmp_path / "checkpoint")
    state = {**published.openai_state(model), "extra": Runs(trap)}
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    for source in (tmp_path / "new.pt", tmp_path / "old.pt", folder):
        refused(source, source.name)
    assert not trap.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_weights_that_are_a_pickle_by_another_name(model, tmp_path: Path, name: str) -> None:
    trap = tmp_path / "ran"
    folder = published.write_huggingface(model, tmp_path / "checkpoint")
    (folder / "model.safetensors").unlink()
    for data in pickles(trap).values():
        (folder / name).write_bytes(data)
        refused(folder, str(folder))
        (folder / "config.json").write_bytes(data)
        refused(folder, str(folder))
        published.write_huggingface(model, folder)
        if name != "model.safetensors":
            (folder / "model.safetensors").unlink()
    assert not trap.exists()


def test_images_and_uploads(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    for number, data in enumerate(pickles(trap).values()):
        for ending in ("jpg", "pkl", "json"):
            path = tmp_path / f"{number}.{ending}"
            path.write_bytes(data)
            with pytest.raises(InputError, match=path.name):
                open_uploads([str(path)])
            with pytest.raises(DearError, match=path.name):
                read_cell(path)
    assert not trap.exists()


def test_a_class_folder_of_pickles(tmp_path: Path) -> None:
    trap, folder = tmp_path / "ran", tmp_path / "photos"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / name / "a.png")
        for number, data in enumerate(pickles(trap).values()):
            (folder / name / f"{number}.jpg").write_bytes(data)
    images = open_data(folder, "all")
    with pytest.raises(InputError, match=r"\d\.jpg"):
        images.pixels(range(len(images)), 8)
    assert not trap.exists()


def test_a_run_folder_in_which_any_file_is_a_pickle(tmp_path: Path) -> None:
    trap, work = tmp_path / "ran", tmp_path / "work"
    clip = tiny_clip(dtype=torch.float32)
    recipe = Recipe(epochs=2, batch=8)

    def method() -> DeAR:
        return DeAR(clip, ("red", "green", "blue"), roles=mixed_roles(), ids=token_ids())

    with pytest.raises(Paused):
        train(method(), Colors(), recipe, tmp_path / "paused", stop=lambda: True)
    train(method(), Colors(), recipe, tmp_path / "done")
    for data in (pickles(trap)["protocol 2"], pickles(trap)["torch.save"]):
        for name in ("config.json", "log.jsonl", "resume.safetensors"):
            shutil.copytree(tmp_path / "paused", work)
            (work / name).write_bytes(data)
            with pytest.raises(DearError, match=name):
                train(method(), Colors(), recipe, work, resume=True)
            shutil.rmtree(work)
        for name in ("config.json", "adapter.safetensors", "roles.json", "metrics.json", "log.jsonl"):
            shutil.copytree(tmp_path / "done", work)
            (work / name).write_bytes(data)
            with pytest.raises(DearError, match=name):
                dear.Classifier.load(work, backbone=clip)
            shutil.rmtree(work)
    assert not trap.exists()


def test_a_sentence_model_of_pickles(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    trap, folder = tmp_path / "ran", tmp_path / "model"
    folder.mkdir()
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))
    for data in pickles(trap).values():
        (folder / "pytorch_model.bin").write_bytes(data)
        with pytest.raises(DearError, match=re.escape(str(folder))):
            sentence_embedder(str(folder))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(trap)!r})\nclass Bad: pass\n")
    for kind in ("evil.Bad", "os.system", str(folder / "evil.Bad")):
        (folder / "modules.json").write_text(json.dumps([{**modules[0], "type": kind}]))
        with pytest.raises(DearError, match=re.escape(str(folder))):
            sentence_embedder(str(folder))
    assert not trap.exists()


@pytest.mark.parametrize("keep", [0, 1, 100, 5000, -10])
def test_truncated_pickles(model, tmp_path: Path, keep: int) -> None:
    file = published.write_state_dict(model, tmp_path / "a.pt")
    file.write_bytes(file.read_bytes()[:keep])
    refused(file, "a.pt")


def test_pickles_without_a_state_dict(tmp_path: Path) -> None:
    for value in ([1, 2], {}, {"a": 1}, torch.zeros(3), {"weights": torch.zeros(3)}):
        torch.save(value, tmp_path / "a.pt")
        refused(tmp_path / "a.pt", "a.pt")


def test_tensors_that_claim_more_than_the_file_holds(model, tmp_path: Path) -> None:
    state = published.openai_state(model)
    state["token_embedding.weight"] = torch.zeros(1).expand(10_000_000, 64)
    torch.save(state, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "a.pt")


@pytest.mark.parametrize("kind", ["meta", "sparse", "quantized"])
def test_tensors_that_are_no_block_of_numbers(model, tmp_path: Path, kind: str) -> None:
    state = published.openai_state(model)
    odd = {
        "meta": torch.zeros(64, device="meta"),
        "sparse": torch.zeros(64).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.zeros(64), 0.1, 0, torch.qint8),
    }
    state["ln_final.weight"] = odd[kind]
    torch.save(state, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "a.pt")
