"""Writes the generated pages of docs/reference: the command line and the papers of the methods.

python scripts/reference.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import typer.main

from dear.cli import build_app

PAGES = Path(__file__).parents[1] / "docs" / "reference"


def command_page() -> str:
    """Every command with its help, arguments, and options."""
    root: Any = typer.main.get_command(build_app())
    parts = ["# Command line", "", "Generated from the code by `python scripts/reference.py`.", ""]
    with click.Context(root, info_name="dear") as context:
        for path, command, inner in _commands(root, context, ("dear",)):
            parts += [f"## {' '.join(path)}", "", *_help(command), ""]
            rows = [row for row in (_row(param, inner) for param in command.params) if row]
            parts += ["| option | meaning | default |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


def _help(command: Any) -> list[str]:
    """The paragraphs of a command's help; examples are indented there and become code."""
    lines = [line.replace("\b", "") for line in (command.help or "").splitlines()]
    return [
        f"    {line.strip()}" if line.startswith(("    dear", "  dear", "dear ")) else line.strip()
        for line in lines
    ]


def _row(param: Any, context: click.Context) -> str:
    name = (
        ", ".join(f"`{opt}`" for opt in (*param.opts, *param.secondary_opts))
        if param.opts[0].startswith("-")
        else f"`{param.human_readable_name}`"
    )
    if name == "`--help`":
        return ""
    default = param.get_default(context, call=False)
    shown = (
        "" if default is None or default is False or default == () or callable(default) else f"`{default}`"
    )
    text = " ".join((getattr(param, "help", None) or "").split()).replace("|", "\\|")
    return f"| {name} | {text} | {shown} |"


def _commands(command: Any, context: click.Context, path: tuple[str, ...]) -> Any:
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        if child is None or child.hidden:
            continue
        with click.Context(child, info_name=name, parent=context) as inner:
            if hasattr(child, "list_commands"):
                yield from _commands(child, inner, (*path, name))
            else:
                yield (*path, name), child, inner


def main() -> None:
    """Write all pages."""
    PAGES.mkdir(parents=True, exist_ok=True)
    (PAGES / "cli.md").write_text(command_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
