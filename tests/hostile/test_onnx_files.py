"""Exported models of strangers: no other file is read, and what the graph gives is checked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dear.errors import DearError
from dear.export.runtime import OnnxModel

onnx = pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
pytest.importorskip("onnxruntime")

IMAGE = Image.new("RGB", (9, 9), (3, 90, 200))
WORDS = {
    "format": "dear onnx",
    "schema": "1",
    "classes": '["cat", "dog"]',
    "modes": '["fused"]',
    "outputs": '["scores"]',
    "preprocessing": '{"size": 8, "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}',
}


def model(words: dict | None = None, value: float = 1.0, width: int = 2, name: str = "scores"):
    """An image's pixels times a matrix."""
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(np.full((192, width), value, dtype=np.float32), "w")
    nodes = [make.make_node("Flatten", ["pixels"], ["f"]), make.make_node("MatMul", ["f", "w"], [name])]
    pixels = make.make_tensor_value_info("pixels", kind, ["b", 3, 8, 8])
    scores = make.make_tensor_value_info(name, kind, ["b", width])
    graph = make.make_graph(nodes, "g", [pixels], [scores], [weight])
    made = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8)
    make.set_model_props(made, {**WORDS, **(words or {})})
    return made


def write(made, path: Path) -> Path:
    path.write_bytes(made.SerializeToString())
    return path


def test_the_small_model_of_these_tests_answers(tmp_path: Path) -> None:
    (answer,) = OnnxModel(write(model(), tmp_path / "a.onnx")).predict([IMAGE])
    assert [name for name, _ in answer.classes] == ["cat", "dog"]


@pytest.mark.parametrize("place", ["secret.bin", "../secret.bin", "/etc/passwd"])
def test_numbers_in_another_file_are_not_read(tmp_path: Path, monkeypatch, place: str) -> None:
    """ONNX lets a tensor lie in another file, anywhere; an exported model is one file."""
    home = tmp_path / "home"
    home.mkdir()
    for secret in (home / "secret.bin", tmp_path / "secret.bin"):
        secret.write_bytes(np.ones((192, 2), dtype=np.float32).tobytes())
    made = model()
    (weight,) = made.graph.initializer
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", place), ("offset", "0"), ("length", "1536")):
        weight.external_data.add(key=key, value=value)
    path = write(made, home / "a.onnx")
    monkeypatch.chdir(home)
    with pytest.raises(DearError, match=r"a\.onnx: "):
        OnnxModel(path)


@pytest.mark.parametrize(
    ("changes", "item"),
    [
        ({"value": float("nan")}, "2 classes"),
        ({"value": float("inf")}, "2 classes"),
        ({"width": 3}, "2 classes"),
        ({"name": "other"}, ""),
        ({"words": {"classes": '["cat"]'}}, "1 classes"),
        ({"words": {"classes": '["cat", "\\u001b[2J"]'}}, "U\\+001B"),
        ({"words": {"classes": '["cat", "\\ud800"]'}}, "classes"),
        ({"words": {"classes": json.dumps(["cat", "x" * 10_000])}}, "10000"),
        ({"words": {"classes": "[" * 100_000}}, "classes"),
        ({"words": {"preprocessing": '{"size": 1e999, "mean": [0,0,0], "std": [1,1,1]}'}}, "preprocessing"),
        ({"words": {"preprocessing": '{"size": 8, "size": 9, "mean": [0,0,0], "std": [1,1,1]}'}}, "'size'"),
        ({"words": {"preprocessing": '{"size": 8, "mean": [0,0,0], "std": [1,0,1]}'}}, "preprocessing"),
        ({"words": {"preprocessing": '{"size": 8, "mean": [0,0,"0"], "std": [1,1,1]}'}}, "preprocessing"),
        ({"words": {"preprocessing": "[]"}}, "preprocessing"),
        ({"words": {"outputs": "[]"}}, "outputs"),
        ({"words": {"outputs": '["scores", "scores"]'}}, "outputs"),
        ({"words": {"held_out": '{"fused": [0.5]}'}}, "outputs"),
        ({"words": {"precision": "int2"}}, "precision"),
        ({"words": {"loss": '{"data": "x", "images": 0, "float32": 1, "reduced": 1, "same": 1}'}}, "loss"),
        ({"words": {"format": "else"}}, ""),
        ({"words": {"schema": "2"}}, "'2'"),
    ],
)
def test_graphs_and_descriptions_that_do_not_fit(tmp_path: Path, changes: dict, item: str) -> None:
    path = write(model(**changes), tmp_path / "a.onnx")
    with pytest.raises(DearError, match=rf"a\.onnx.*{item}"):
        OnnxModel(path).predict([IMAGE])


def test_images_of_another_size_than_the_graph_takes(tmp_path: Path) -> None:
    other = '{"size": 16, "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}'
    path = write(model({"preprocessing": other}), tmp_path / "a.onnx")
    with pytest.raises(DearError, match=r"a\.onnx"):
        OnnxModel(path).predict([IMAGE])


def test_a_description_that_is_no_text(tmp_path: Path) -> None:
    data = model().SerializeToString().replace(b"cat", b"c\xed\xa0")
    (tmp_path / "a.onnx").write_bytes(data)
    with pytest.raises(DearError, match=r"a\.onnx"):
        OnnxModel(tmp_path / "a.onnx")
