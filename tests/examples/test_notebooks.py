"""The notebooks run from top to bottom in Jupyter; their own assertions check what their texts claim."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
RENDERED = {  # variables that a cell ends with, as HTML
    "photos_to_answers": ("before", "run", "after", "answers[:5]"),
    "find_and_repair_a_shortcut": ("audit",),
    "what_heads_do": ("roles",),
}
NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(path.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    )
    notebook = nbformat.read(path, as_version=4)
    assert any(cell.get("outputs") for cell in notebook.cells), (
        "stored without outputs: jupyter nbconvert --execute"
    )
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            pages = [output.data.get("text/html", "") for output in cell.outputs if "data" in output]
            shown[cell.source.splitlines()[-1]] = "".join(pages)
    for name in RENDERED[path.stem]:
        assert "<table" in shown[name], name
    if path.stem == "photos_to_answers":
        assert "<progress" in shown["run"]
