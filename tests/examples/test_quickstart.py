"""The notebook runs from top to bottom; its cells are executed here as a kernel would, without Jupyter."""

import ast
import json
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


def run_cell(source, names):
    """Execute a cell and return the value of its last expression, as Jupyter shows it."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_the_quickstart_runs_and_shows_something():
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert text.count("shots=16") == 1
    notebook = json.loads(text.replace("shots=16", "shots=4"))  # quicker; everything else is as in the file
    assert notebook["nbformat"] == 4
    names, shown = {}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            said = [output for output in cell["outputs"] if output["output_type"] == "execute_result"]
            value = run_cell("".join(cell["source"]), names)
            assert (value is not None) == bool(said)  # stored by scripts/run_notebook.py
            if value is not None:
                shown.append(value)
    kinds = [type(value).__name__ for value in shown]
    assert kinds.count("Figure") == 4
    assert "Image" in kinds
    assert set(shown[-1]) == {"Color", "Shape", "Texture", "Object", "Location"}
