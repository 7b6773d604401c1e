"""Readers of run folders and exported models."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import msgspec
import mutate
import numpy as np
import onnx
import safetensors.torch
import torch
from fuzzing import Target
from made_cells import make_cell
from PIL import Image
from tiny import Colors, mixed_roles, tiny_clip, token_ids

from dear.bench.cells import Cell, Outcome
from dear.bench.store import Grid, read_cell
from dear.export.runtime import OnnxModel, _parse
from dear.methods import DeAR
from dear.runs.folder import load_run, read_log, read_metrics
from dear.runs.recipe import Recipe
from dear.train.run import Paused, train
from dear.utils.text import first_unprintable

CLASSES = ("red", "green", "blue")
RECIPE = Recipe(epochs=2, batch=8, lr=1e-2)
_DESCRIPTION = {
    "format": "dear onnx", "schema": "1", "classes": '["cat", "dog"]', "modes": '["fused"]',
    "outputs": '["s"]',
    "preprocessing": '{"size": 8, "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}',
}  # fmt: skip


def _method(clip):
    return DeAR(clip, CLASSES, roles=mixed_roles(), ids=token_ids())


def _run(folder: Path) -> tuple[Path, object]:
    """A finished run on a tiny backbone."""
    clip = tiny_clip(dtype=torch.float32)
    place = folder / "run"
    train(_method(clip), Colors(), RECIPE, place)
    return place, clip


def _check(place: Path, clip) -> None:
    method = load_run(place, backbone=clip)
    assert all(first_unprintable(name) is None for name in method.classes)
    assert all(
        bool(torch.isfinite(t).all()) for t in method.adapter_state().values() if t.is_floating_point()
    )
    logits = method.logits(torch.zeros(1, 3, 24, 24))
    assert logits.shape == (1, len(method.classes))


def run_config(folder: Path) -> Target:
    place, clip = _run(folder)
    path = place / "config.json"
    plain = {**json.loads(path.read_text()), "ids": None}

    def read(data: bytes) -> None:
        path.write_bytes(data)
        _check(place, clip)

    seeds = [path.read_bytes(), json.dumps(plain).encode()]
    return Target("run-config", seeds, read, mutate.json_text)


def run_roles(folder: Path) -> Target:
    place, clip = _run(folder)
    path = place / "roles.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        _check(place, clip)

    return Target("run-roles", [path.read_bytes()], read, mutate.json_text)


def adapter(folder: Path) -> Target:
    place, clip = _run(folder)
    path = place / "adapter.safetensors"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        _check(place, clip)

    return Target("adapter", [path.read_bytes()], read, mutate.safetensors_file)


def resume(folder: Path) -> Target:
    """A saved training state: it is continued to the end, or refused before the first step."""
    clip = tiny_clip(dtype=torch.float32)
    place, work = folder / "paused", folder / "work"
    with contextlib.suppress(Paused):
        train(_method(clip), Colors(), RECIPE, place, stop=lambda: True)

    def read(data: bytes) -> None:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(place, work)
        (work / "resume.safetensors").write_bytes(data)
        method = _method(clip)
        train(method, Colors(), RECIPE, work, resume=True)
        found = safetensors.torch.load_file(work / "adapter.safetensors")
        assert all(bool(torch.isfinite(t).all()) for t in found.values())

    good = (place / "resume.safetensors").read_bytes()
    return Target("resume-state", [good], read, mutate.safetensors_file, [b'"step":"9"', b"optimizer.0."])


def log(folder: Path) -> Target:
    path = folder / "log.jsonl"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        assert all(type(line["step"]) is int for line in read_log(folder))

    return Target(
        "log",
        [b'{"step": 1, "epoch": 1, "lr": 0.1, "loss": 2.5}\n{"step": 2, "loss": 1}\n'],
        read,
        mutate.json_text,
    )


def metrics(folder: Path) -> Target:
    path = folder / "metrics.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        assert type(read_metrics(folder)["steps"]) is int

    seeds = [b'{"steps": 4, "seconds": 1.5, "loss": {"step": 1}, "fusion_weights": {"class": 1}}']
    return Target("metrics", seeds, read, mutate.json_text)


def cell(folder: Path) -> Target:
    path = folder / "cell.json"
    grid = Grid(folder / "grid")
    made = {"dear": "0.1.0", "torch": "2", "hardware": "x86"}
    result = {
        "modes": {"fused": {"base": 0.5, "novel": 0.25, "hm": 0.33}, "decoupled": {"base": 1, "novel": None}},
        "facts": {"fusion_weights": {"class": 0.5, "Color": 0.5}}, "seconds": {"train": 1.0},
        "made_with": made,
    }  # fmt: skip
    one = make_cell("base-to-novel", "dear", "world:textures", options={"beta": 0.9}, recipe={"epochs": 1})
    few = make_cell("few-shot", "dear", "world:textures", 1, 4)
    cross = make_cell("cross-dataset", "dear", "A", 1, 4, setting={"targets": ["B"]})
    seeds = []
    for each, modes in (
        (one, result["modes"]),
        (few, {"default": {"accuracy": 0.5}}),
        (cross, {"default": {"A": 0.5, "B": 0.1}}),
    ):  # fmt: skip
        grid.store(Outcome(each, {**result, "modes": modes}))
        seeds.append(grid.path(each).read_bytes())

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_cell(path)

    def change(data: bytes, rng, pool, words) -> bytes:
        """Mostly with a key that fits: else nothing but the key would be looked at."""
        changed = mutate.json_text(data, rng, pool, words)
        try:
            document = json.loads(changed)
            document["key"] = msgspec.convert(document["cell"], Cell).key
            return json.dumps(document).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, KeyError, RecursionError, AttributeError):
            return changed

    return Target("cell", seeds, read, change)


def onnx_description(folder: Path) -> Target:
    """What an exported model says of itself."""
    good = _DESCRIPTION

    def read(data: bytes) -> None:
        raw = json.loads(data)
        found = _parse(raw, Path("a.onnx"))
        assert 0 < found.preprocessing.size <= 4096
        assert all(first_unprintable(name) is None for name in found.classes)

    def change(data: bytes, rng, pool, words) -> bytes:
        """One entry changed; all stay texts, as ONNX has them."""
        raw = json.loads(data)
        key = rng.choice(list(raw))
        raw[key] = mutate.json_text(str(raw[key]).encode(), rng, pool, words).decode("utf-8", "replace")
        if rng.random() < 0.1:
            del raw[key]
        return json.dumps(raw or good).encode()

    return Target("onnx-description", [json.dumps(good).encode()], read, change)


def onnx_file(folder: Path) -> Target:
    """An exported model: its graph is loaded and run."""
    path = folder / "a.onnx"
    pixels = onnx.helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, ["b", 3, 8, 8])
    scores = onnx.helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, ["b", 2])
    weight = onnx.numpy_helper.from_array(np.ones((192, 2), dtype=np.float32), "w")
    nodes = [
        onnx.helper.make_node("Flatten", ["pixels"], ["f"]),
        onnx.helper.make_node("MatMul", ["f", "w"], ["s"]),
    ]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "g", [pixels], [scores], [weight]),
        opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8,
    )  # fmt: skip
    onnx.helper.set_model_props(model, _DESCRIPTION)
    image = Image.new("RGB", (9, 9), (3, 90, 200))

    def read(data: bytes) -> None:
        path.write_bytes(data)
        (answer,) = OnnxModel(path, threads=1).predict([image])
        assert abs(sum(share for _, share in answer.classes) - 1) < 1e-3

    words = [b"location", b"../../etc/passwd", b"external", b"/etc/passwd", b"MatMul", b"Loop", b"pixels"]
    return Target("onnx-file", [model.SerializeToString()], read, words=words)


TARGETS = {
    "run-config": run_config,
    "run-roles": run_roles,
    "adapter": adapter,
    "resume-state": resume,
    "log": log,
    "metrics": metrics,
    "cell": cell,
    "onnx-description": onnx_description,
    "onnx-file": onnx_file,
}
