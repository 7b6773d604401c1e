"""A tree of classes: how it is read, sums upward, nodes that are named, rejection, and metrics by level."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dear
from dear.data.images import ImageSet
from dear.data.tree import read_tree, resolve_tree
from dear.errors import DataError, UsageError
from dear.runs.model import Model
from dear.runs.tree import Tree, tree_figures

FAUNA = {"pet": ["dog", "cat", "rabbit"], "wild": {"reptile": ["turtle", "snake"], "insect": ["butterfly"]}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    (folder / "tree.json").write_text(json.dumps(FAUNA))
    dear.adapt(
        "world:fauna", folder / "run", method="proker", shots=8, tree=folder / "tree.json", check=False
    )
    return folder / "run"


@pytest.fixture(scope="module")
def animals() -> ImageSet:
    return dear.open_data("world:fauna", "test").subset(range(0, 600, 3))


def test_both_forms_are_one_tree() -> None:
    nested = read_tree(FAUNA)
    assert nested["turtle"] == "reptile"
    assert nested["reptile"] == "wild"
    assert read_tree(nested) == nested


@pytest.mark.parametrize(
    ("tree", "item"),
    [
        ({"cat": ["siamese"], "dog": ["siamese"]}, "siamese"),
        ({"a": "b", "b": "c", "c": "a"}, "a.*b.*c"),
        ({"a": {"b": {"a": ["x"]}}}, "a.*b"),
        ({"cat": 3}, "cat"),
        ({"cat": [3]}, "3"),
        ([], r"tree\.json"),
    ],
)
def test_malformed_trees_name_the_item(tmp_path: Path, tree: object, item: str) -> None:
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match=item):
        read_tree(tmp_path / "tree.json")


def test_names_must_be_classes_or_parents() -> None:
    with pytest.raises(DataError, match=r"'siamesee'.*'siamese'"):
        resolve_tree({"siamesee": "cat"}, ["beagle", "poodle", "terrier", "siamese"])
    with pytest.raises(DataError, match="'siamese cat'"):  # two spellings of one class
        resolve_tree({"Siamese_cat": "cat", "siamese cat": "dog"}, ["siamese cat"])
    with pytest.raises(DataError, match="'cat'"):
        resolve_tree({"siamese": "cat"}, ["siamese", "cat"])


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        ("path,label,parent", ["siamese,animal/cat", "persian,animal/cat", "beagle,animal/dog"]),
        ("path,label", ["animal/cat/siamese", "animal/cat/persian", "animal/dog/beagle"]),
    ],
)
def test_tables_hold_trees(tmp_path: Path, header: str, rows: list[str]) -> None:
    for number in range(3):
        Image.new("RGB", (8, 8), (80 * number, 0, 0)).save(tmp_path / f"{number}.png")
    lines = [f"{number}.png,{row}" for number, row in enumerate(rows)]
    (tmp_path / "t.csv").write_text("\n".join([header, *lines]))
    images = dear.open_data(tmp_path / "t.csv", "all")
    assert set(images.classes) == {"beagle", "persian", "siamese"}
    assert images.parents == {
        "siamese": "cat", "persian": "cat", "beagle": "dog", "cat": "animal", "dog": "animal"
    }  # fmt: skip


def test_malformed_columns_name_the_row(tmp_path: Path) -> None:
    for number in range(2):
        Image.new("RGB", (8, 8), (80 * number, 0, 0)).save(tmp_path / f"{number}.png")
    for rows, item in (
        ("0.png,siamese,cat\n1.png,siamese,dog", "'siamese'"),
        ("0.png,beagle,dog\n1.png,siamese,cat/animal/cat", "cat < animal < cat"),
    ):
        (tmp_path / "t.csv").write_text(f"path,label,parent\n{rows}")
        with pytest.raises(DataError, match=f"row 3, column parent.*{item}"):
            dear.open_data(tmp_path / "t.csv", "all")
    (tmp_path / "t.csv").write_text("path,label,parent\n0.png,beagle,\n1.png,siamese,cat")
    assert dear.open_data(tmp_path / "t.csv", "all").parents == {"siamese": "cat"}


def test_a_label_with_a_slash_is_no_path_unless_all_are(tmp_path: Path) -> None:
    for number in range(2):
        Image.new("RGB", (8, 8), (80 * number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "t.csv").write_text("path,label\n0.png,a/c unit\n1.png,fan")
    images = dear.open_data(tmp_path / "t.csv", "all")
    assert "a/c unit" in images.classes
    assert images.parents is None


def test_the_deepest_certain_node() -> None:
    tree = Tree({"a": "x", "b": "x", "x": "y", "c": "y"}, ("a", "b", "c", "d"))
    p = torch.tensor(
        [[0.9, 0.05, 0.05, 0.0], [0.5, 0.4, 0.05, 0.05], [0.5, 0.1, 0.3, 0.1], [0.3, 0.1, 0.1, 0.5]]
    )
    sums = tree.sums(p)
    for row, values in zip(p.tolist(), sums.tolist(), strict=True):  # the obvious sum
        for node, value in zip(tree.nodes, values, strict=True):
            expected = sum(q for name, q in zip(tree.classes, row, strict=True) if node in tree.path(name))
            assert value == pytest.approx(expected)
    named = [tree.nodes[place] if place >= 0 else None for place in tree.deepest(sums, 0.8).tolist()]
    assert named == ["a", "x", "y", None]
    above = tree.deepest(sums, 0.8, np.array([True, False, False, False]))
    assert tree.nodes[int(above[0])] == "x"
    figures = tree_figures(tree, p, torch.tensor([0, 1, 0, 3]))
    assert figures.accuracy == 1.0
    assert figures.unnamed == 0.25
    assert figures.levels[0] >= figures.levels[-1]


def test_answers_name_nodes(run: Path, animals: ImageSet) -> None:
    model, images = Model.load(run), animals
    tree = model.tree
    assert tree is not None
    answers = model.answers(images, top=12, certain=0.9)
    backed_off = 0
    for answer in answers:
        assert answer.node is not None
        below = [value for name, value in answer.classes if answer.node[0] in tree.path(name)]
        assert answer.node[1] == pytest.approx(sum(below), abs=1e-5)
        backed_off += answer.node[0] not in tree.classes
        if answer.classes[0][1] >= 0.9:
            assert answer.node[0] == answer.classes[0][0]
    assert backed_off
    assert dear.predict(run, images, certain=0.9).labels == [
        answer.node[0] for answer in answers if answer.node
    ]


def test_rejection_backs_off_first(run: Path, animals: ImageSet) -> None:
    model, images = Model.load(run), animals
    plain = model.with_method(model.method)
    plain.spec = None
    every, tree = (one.answers(images, top=1, reject=0.2) for one in (plain, model))
    refused = sum(bool(answer.rejected) for answer in every)
    assert sum(bool(answer.rejected) for answer in tree) < refused
    classes = set(model.classes)
    for one, two in zip(every, tree, strict=True):
        if one.rejected and not two.rejected:
            assert two.node is not None
            assert two.node[0] not in classes


def test_evaluation_by_level(run: Path, animals: ImageSet) -> None:
    report = dear.evaluate(run, animals).to_dict()
    levels = report["tree"]["levels"]
    assert len(levels) == 3
    assert levels[-1] == pytest.approx(report["accuracy"])
    assert levels[0] >= levels[1] >= levels[2]
    assert sum(report["tree"]["named"]) + report["tree"]["unnamed"] == pytest.approx(1)


def test_certain_needs_a_tree(run: Path) -> None:
    images = dear.open_data("world:fauna", "test").subset([0])
    with pytest.raises(UsageError, match=r"0\.2"):
        dear.predict(run, images, certain=0.2)
    frozen = dear.adapt("world:fauna", method="zeroshot", shots=1, calibrate=False, check=False)
    with pytest.raises(UsageError, match="tree"):
        dear.predict(frozen, images, certain=0.9)


def test_the_studio_and_the_report_show_nodes(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    from dear.studio.classify import classify, verdicts_html
    from dear.studio.state import StudioState

    model, images = Model.load(run), dear.open_data("world:fauna", "test").subset(range(0, 600, 20))
    state = StudioState(model.clip, None, images, tmp_path, model)
    names = [(images.key(place), images.image(place)) for place in range(len(images))]
    backed_off = 0
    for verdict, answer in zip(
        classify(state, names, model.classes, model.template, reject=0.2),
        model.answers([image for _, image in names], reject=0.2),
        strict=True,
    ):
        assert verdict.node == answer.node
        assert bool(verdict.rejected) == answer.rejected
        if answer.node is not None and answer.node[0] not in model.classes:
            backed_off += 1
            assert f"{answer.node[0]} {answer.node[1]:.1%}" in verdicts_html([verdict])
    assert backed_off
    dear.report_run(run, tmp_path / "page.html", data=images)
    page = (tmp_path / "page.html").read_text()
    figures = dear.evaluate(run, images).to_dict()["tree"]
    for value in (*figures["levels"], *figures["named"], figures["accuracy"]):
        assert f"{value:.1%}" in page


def test_exported_models_back_off_as_the_run_does(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from dear.export.runtime import OnnxModel

    dear.export_run(run, onnx=tmp_path / "model.onnx")
    exported, model = OnnxModel(tmp_path / "model.onnx"), Model.load(run)
    images = dear.open_data("world:fauna", "test").subset(range(0, 600, 20))
    files = [tmp_path / f"{place}.png" for place in range(len(images))]
    for place, file in enumerate(files):
        images.image(place).save(file)
    for settings in ({}, {"certain": 0.95}, {"reject": 0.3}):
        nodes = set()
        for one, two in zip(
            dear.predict(exported, files, **settings), dear.predict(model, files, **settings), strict=True
        ):
            assert one.rejected == two.rejected
            assert (one.node is None) == (two.node is None)
            if one.node is not None and two.node is not None:
                assert one.node[0] == two.node[0]
                assert one.node[1] == pytest.approx(two.node[1], abs=1e-3)
                nodes.add(one.node[0])
        assert nodes & {"pet", "wild", "reptile"}
    with pytest.raises(UsageError, match=r"0\.2"):
        dear.predict(exported, files[:1], certain=0.2)
