"""Library errors speak of parameters and functions; only the command line names its options."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import dear
from dear.cli.hints import HINTS, sentence
from dear.errors import DearError, RunError

SOURCE = Path(dear.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*(?![\w:-])")
COMMAND = re.compile(r"`dear [a-z]")


def literals(path: Path) -> list[tuple[int, str]]:
    """String literals of a module that are no docstrings, with their lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare
    ]


def modules() -> list[Path]:
    return [p for p in SOURCE.rglob("*.py") if "cli" not in p.relative_to(SOURCE).parts]


def test_no_module_outside_the_command_line_names_a_flag() -> None:
    own_parser = re.compile(r"ArgumentParser")  # a module that is run by itself has flags of its own
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {text}"
        for path in modules()
        if not own_parser.search(path.read_text(encoding="utf-8"))
        for line, text in literals(path)
        if "{" not in text.replace("{}", "")  # style sheets have --names of their own
        and (FLAG.search(text) or (COMMAND.search(text) and "studio" not in path.parts))
    ]
    assert found == []


def test_the_search_finds_flags() -> None:
    assert FLAG.search("say it with --data-root FOLDER")
    assert FLAG.search("--port 3: choose another")
    assert not FLAG.search("a -- b, --ink: #fff")


def test_every_hint_has_a_sentence_and_every_sentence_a_user() -> None:
    used = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                used |= {
                    c.value
                    for keyword in node.keywords
                    if keyword.arg == "hint"
                    for c in ast.walk(keyword.value)
                    if isinstance(c, ast.Constant) and isinstance(c.value, str)
                }
    assert used - set(HINTS) == set()


def test_the_hint_of_a_cause_is_told() -> None:
    error = RunError("run/config.json: cannot be used")
    error.__cause__ = DearError("the run is not complete", hint="resume")
    assert sentence(error) == "run/config.json: cannot be used; continue with --resume"
    assert sentence(DearError("plain")) == "plain"
    assert sentence(DearError("unknown key", hint="no such key")) == "unknown key"
