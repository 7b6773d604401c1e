"""The import graph is a contract: the table of modules holds, and the diagram shows the graph as it is."""

from __future__ import annotations

import ast
import importlib.util
import logging
from pathlib import Path

import pytest

import dear

cli = pytest.importorskip("importlinter.cli")
tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")

ROOT = Path(__file__).parents[1]
SOURCE = Path(dear.__file__).parent
PARTS = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
# What training and protocols may ask of `dear.methods`: the registry and the contract, never one method.
CONTRACT = {"METHODS", "Method", "build_method", "find_method", "list_methods"}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "scripts" / "architecture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kept(config: Path) -> bool:
    status = cli.lint_imports(config_filename=str(config), no_cache=True)
    for name in list(logging.root.manager.loggerDict):  # import-linter's configuration disables them all
        logging.getLogger(name).disabled = False
    return status == cli.EXIT_STATUS_SUCCESS


def test_the_table_of_modules_holds_on_the_real_graph(capsys) -> None:
    assert kept(ROOT / "pyproject.toml"), capsys.readouterr().out


def test_imports_inside_functions_count(tmp_path: Path) -> None:
    """`dear.cli` imports the rest inside functions only: a contract against that must be broken."""
    config = tmp_path / "pyproject.toml"
    config.write_text(
        '[tool.importlinter]\nroot_package = "dear"\n[[tool.importlinter.contracts]]\nname = "x"\n'
        'type = "forbidden"\nsource_modules = ["dear.cli"]\nforbidden_modules = ["dear.tasks"]\n'
        "allow_indirect_imports = true\n"
    )
    assert not kept(config)


@pytest.mark.parametrize("part", ["train", "bench"])
def test_no_method_is_named_outside_of_methods(part: str) -> None:
    for path in (SOURCE / part).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "dear.methods":
                assert {alias.name for alias in node.names} <= CONTRACT, path


def test_the_diagram_of_the_page_is_the_contract(script) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert script.diagram() in page
    assert [part for part in sorted(PARTS) if f"`dear.{part}`" not in page] == []
