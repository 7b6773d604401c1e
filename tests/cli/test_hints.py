"""What the command line adds to an error of the library."""

from __future__ import annotations

import ast
from pathlib import Path

import dear
from dear.cli.hints import HINTS, error_message
from dear.errors import DearError, RunError

SOURCE = Path(dear.__file__).parent


def modules() -> list[Path]:
    return [p for p in SOURCE.rglob("*.py") if "cli" not in p.relative_to(SOURCE).parts]


def test_every_hint_has_a_sentence() -> None:
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
    assert error_message(error) == "run/config.json: cannot be used; continue with --resume"
    assert error_message(error, {"--data", "--out"}) == "run/config.json: cannot be used"  # without --resume
    assert error_message(DearError("plain")) == "plain"
    assert error_message(DearError("unknown key", hint="no such key")) == "unknown key"
