"""Role maps and adapters for other weights, other classes, other shapes: refused before they are used."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tiny import Colors, mixed_roles, tiny_clip, token_ids

import dear
from dear.errors import DearError, RoleError, RunError
from dear.heads.roles import RoleMap
from dear.methods import METHODS, DeAR, build_method
from dear.runs.folder import load_run
from dear.runs.recipe import Recipe
from dear.train.run import train

CLASSES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def clip():
    return tiny_clip(dtype=torch.float32)


@pytest.fixture(scope="module")
def finished(clip, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    method = DeAR(clip, CLASSES, roles=mixed_roles(), ids=token_ids())
    train(method, Colors(), Recipe(epochs=1, batch=8), folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(path: Path, change) -> None:
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)


def refused(run: Path, clip, *parts: str) -> None:
    with pytest.raises(DearError) as caught:
        load_run(run, backbone=clip)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


# --- role maps ---------------------------------------------------------------------------------------------


def test_a_map_of_other_weights_is_refused_unless_asked_for(clip, tmp_path: Path) -> None:
    other = tiny_clip(seed=5, dtype=torch.float32)
    path = tmp_path / "roles.json"
    mixed_roles().save(path)
    change_json(path, fingerprint=other.fingerprint, backbone="other", depth=6)
    roles = RoleMap.load(path)
    with pytest.raises(RoleError, match="allow_other=True"):
        DeAR(clip, CLASSES, roles=roles)
    assert "other" in (DeAR(clip, CLASSES, roles=roles, allow_other_roles=True).notice or "")


@pytest.mark.parametrize("roles", [mixed_roles(heads=5), mixed_roles(layers=range(5, 9)), RoleMap.table2()])
def test_a_map_of_another_shape_is_refused_even_if_asked_for(clip, roles: RoleMap) -> None:
    with pytest.raises(RoleError, match=r"\b6\b.*\b4\b"):
        DeAR(clip, CLASSES, roles=roles, allow_other_roles=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 3},
        {"schema": True},
        {"fingerprint": "md5:1"},
        {"layers": [4, 5, 5]},
        {"layers": []},
        {"layers": [0, 1, 2]},
        {"heads": 10**9},
        {"heads": 4.0},
        {"heads": True},
        {"core": ["Color", "Color"]},
        {"core": []},
        {"core": ["x" * 1000]},
        {"roles": []},
        {"roles": {}},
        {"backbone": "\x1b[2J"},
        {"backbone": 3},
        {"rule": "a\u202eb"},
        {"evidence": {"image_count": "many"}},
        {"evidence": {"concept_of": ["a"]}},
        {"evidence": {"explained": {"4": [0.5]}}},
        {"evidence": {"concepts": {"concepts": {"Color": {"phrases": "<script>", "clusters": 1}}}}},
        {"surplus": 1},
    ],
)
def test_malformed_maps_are_refused(tmp_path: Path, changes: dict) -> None:
    path = tmp_path / "roles.json"
    mixed_roles().save(path)
    change_json(path, **changes)
    with pytest.raises(RoleError, match=r"roles\.json"):
        RoleMap.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "boss"},
        {"kind": ["core"]},
        {"kind": "core", "concept": None},
        {"kind": "core", "concept": "Weather"},
        {"layer": 99},
        {"head": -1},
        {"entropy": -1},
        {"entropy": 10**299},
        {"entropy": "0"},
        {"shares": {"Color": 2}},
        {"shares": {"Color": 0.5}},
        {"shares": {"\x1b": 1.0}},
        {"phrases": ["a\x00b"]},
        {"phrases": ["x" * 10_000]},
        {"phrases": "abc"},
        {"phrases": [1]},
    ],
)
def test_malformed_heads_are_refused(tmp_path: Path, changes: dict) -> None:
    path = tmp_path / "roles.json"
    mixed_roles().save(path)
    document = json.loads(path.read_text())
    document["roles"][1] |= changes
    path.write_text(json.dumps(document))
    if changes.get("entropy") == 10**299:  # large, but a number of bits
        assert RoleMap.load(path)
        return
    with pytest.raises(RoleError, match=r"roles\.json"):
        RoleMap.load(path)


# --- adapters ----------------------------------------------------------------------------------------------


def test_an_adapter_of_other_weights_is_refused(run: Path) -> None:
    refused(run, tiny_clip(seed=5, dtype=torch.float32), "run")


@pytest.mark.parametrize(
    ("change", "item"),
    [
        (lambda t: t.pop("v"), "v "),
        (lambda t: t.update(extra=torch.zeros(3)), "extra"),
        (lambda t: t.update(v=torch.zeros(7)), "[7]"),
        (
            lambda t: t.update(tokens=t["tokens"].T.contiguous()),
            "[36, 5]",
        ),
        (lambda t: t["tokens"][2].fill_(float("nan")), "'tokens'"),
        (lambda t: t["v"].fill_(float("-inf")), "'v'"),
        (lambda t: t.update(v=torch.zeros(6, dtype=torch.complex64)), "complex64"),
        (lambda t: t.update(v=torch.zeros(6, dtype=torch.int64)), "int64"),
    ],
)
def test_an_adapter_of_other_tensors_is_refused(run: Path, clip, change, item: str) -> None:
    change_tensors(run / "adapter.safetensors", change)
    refused(run, clip, "adapter.safetensors", item)


def test_an_adapter_tied_to_its_classes_is_refused_on_others(clip, tmp_path: Path) -> None:
    method = build_method("linear-probe", clip, CLASSES)
    train(method, Colors(), Recipe(epochs=1, batch=8), tmp_path / "probe")
    change_json(tmp_path / "probe" / "config.json", classes=["red", "green", "blue", "white"])
    refused(tmp_path / "probe", clip, "adapter.safetensors", "[4")


@pytest.mark.parametrize(
    ("changes", "item"),
    [
        ({"classes": ["red", "green"]}, "ids"),
        ({"classes": ["red", "green", "\x1b[2J"]}, "U+001B"),
        ({"classes": ["red", "green", "x" * 10_000]}, "10000"),
        ({"classes": ["red", "green", ""]}, "config.json"),
        ({"classes": ["red", "green", 7]}, "classes[2]"),
        ({"classes": []}, "classes"),
        ({"ids": [[1, 2], [3]]}, "config.json"),
        ({"ids": [[10**30]] * 3}, "config.json"),
        ({"ids": [[49_500]] * 3}, "token"),
        ({"ids": None, "classes": ["red", "green", "<|endoftext|>"]}, "<|endoftext|>"),
        ({"template": "no braces"}, "{}"),
        ({"method": "evil"}, "'evil'"),
        ({"method": "coop"}, "alpha_rate"),
        ({"options": {"beta": "much"}}, "'much'"),
        ({"options": {"beta": {}}}, "beta"),
        ({"options": {"text_tokens": 10**12}}, "text_tokens"),
        ({"options": {"__class__": 1}}, "'__class__'"),
        ({"options": {"attributes": ["Weather"]}}, "'Weather'"),
        ({"options": {"attributes": ["Animal"]}}, "["),
        ({"identity": "sha256:0"}, "sha256:0"),
        ({"schema": 99}, "99"),
        ({"format": "else"}, "config.json"),
        ({"recipe": []}, "recipe"),
    ],
)
def test_run_configurations_that_do_not_fit_are_refused(run: Path, clip, changes: dict, item: str) -> None:
    change_json(run / "config.json", **changes)
    refused(run, clip, str(run), item)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"steps": true}', '{"steps": "4"}', "null", '{"steps": 1e999}']
)
def test_metrics_that_are_none_are_refused(run: Path, clip, text: str) -> None:
    (run / "metrics.json").write_text(text)
    with pytest.raises(DearError, match=r"metrics\.json"):
        dear.Classifier.load(run, backbone=clip)


@pytest.mark.parametrize(
    "line", ["[]", '{"loss": 1}', '{"step": 1, "loss": "x"}', '{"step": true}', "x", "\ud800"]
)
def test_logs_that_are_none_are_refused(run: Path, clip, line: str) -> None:
    (run / "log.jsonl").write_bytes(b'{"step": 1}\n' + line.encode("utf-8", "surrogatepass"))
    with pytest.raises(DearError, match=r"log\.jsonl"):
        dear.Classifier.load(run, backbone=clip)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_method_takes_the_tensors_of_another_shape(clip, name: str) -> None:
    """Every method compares names and shapes before it takes anything over."""
    method = build_method(name, clip, CLASSES, roles=mixed_roles())
    state = method.adapter_state()
    if not state:
        return
    for key in state:
        for wrong in (torch.zeros(2, 3, 4), torch.zeros(1, 0, 1, 1)):
            with pytest.raises(RunError, match=re.escape(key)):
                method.load_adapter_state({**state, key: wrong})
    with pytest.raises(RunError, match=re.escape(min(state))):
        method.load_adapter_state({})
