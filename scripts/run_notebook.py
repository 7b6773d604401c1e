"""Run examples/quickstart.ipynb from top to bottom and store what its cells print and show.

python scripts/run_notebook.py examples/quickstart.ipynb
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Execute a cell as Jupyter does: what it printed, and the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return printed.getvalue(), value


def shown(value: Any) -> dict[str, Any]:
    """A value in the forms that a notebook stores."""
    kind = type(value).__name__
    if kind == "Figure":
        return {
            "application/vnd.plotly.v1+json": json.loads(value.to_json()),
            "text/plain": [f"<{kind}: {value.layout.title.text or 'plot'}>"],
        }
    if hasattr(value, "save") and hasattr(value, "size"):  # a Pillow image
        data = io.BytesIO()
        value.convert("RGB").save(data, "PNG")
        return {"image/png": base64.b64encode(data.getvalue()).decode(), "text/plain": [f"<{kind}>"]}
    return {"text/plain": repr(value).splitlines(keepends=True)}


def run(path: Path) -> None:
    """Execute all cells and write the notebook with their outputs."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        printed, value = run_cell("".join(cell["source"]), names)
        cell["execution_count"], cell["outputs"] = count, []
        if printed:
            cell["outputs"].append(
                {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
            )
        if value is not None:
            cell["outputs"].append(
                {
                    "data": shown(value),
                    "execution_count": count,
                    "metadata": {},
                    "output_type": "execute_result",
                }
            )
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
