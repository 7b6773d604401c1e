"""House rules that a program can check: sizes of functions and of their parameter lists."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dear"

MAX_LINES, MAX_PARAMETERS = 60, 10
LONG = {
    "dear/world/tasks.py:_make": "the table of the attribute world's tasks",
}
MANY_PARAMETERS = {
    "dear/workflows/classifier.py:__init__": "scikit-learn's manners: parameters are visible and copyable",
}
COMMANDS = "dear/cli/"  # the options of a command are its parameters, one or more lines each
KERNELS = "kernels.py"

def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(SOURCE.parent).as_posix()}:{node.name}", node


def lines_of(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """All lines of a function; of a command those after its options and its help text."""
    first = node.lineno
    if name.startswith(COMMANDS):
        body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
        first = body[0].lineno
    return (node.end_lineno or first) - first + 1


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(one.arg not in ("self", "cls", "ctx") for one in every)


def test_functions_are_short():
    long = {name: lines_of(name, node) for name, node in functions() if lines_of(name, node) > MAX_LINES}
    assert {name: lines for name, lines in long.items() if name not in LONG} == {}
    assert set(LONG) <= set(long), "an exception that is not needed any more"


def test_functions_take_few_parameters():
    many = {name: parameters_of(node) for name, node in functions() if parameters_of(node) > MAX_PARAMETERS}
    free = {name for name in many if name.startswith(COMMANDS) or name.split(":")[0].endswith(KERNELS)}
    assert {name: count for name, count in many.items() if name not in free | set(MANY_PARAMETERS)} == {}
    assert set(MANY_PARAMETERS) <= set(many), "an exception that is not needed any more"
