"""Cells that learn from the training images outside the draw, without their labels."""

from __future__ import annotations

import json
from pathlib import Path

from dear.bench.task import run
from dear.runs.spec import Spec


def test_cells_with_and_without_unlabeled_images_differ(tmp_path: Path) -> None:
    settings = {"methods": ["proker"], "datasets": ["world:textures"], "seeds": [1], "shots": [2]}
    plain = run("few-shot", tmp_path / "plain", **settings)
    with_rest = run("few-shot", tmp_path / "rest", unlabeled=True, **settings)
    documents = []
    for folder in ("plain", "rest"):
        files = [path for path in (tmp_path / folder).rglob("*.json") if '"result"' in path.read_text()]
        documents += [json.loads(path.read_text()) for path in files]
    assert plain.summary.failed == with_rest.summary.failed == {}
    assert documents[0]["key"] != documents[-1]["key"]
    assert "unlabeled" in json.dumps(documents[-1]["result"])
    assert Spec(unlabeled="rest").key != Spec().key == Spec(unlabeled="rest", unlabeled_weight=0.0).key
