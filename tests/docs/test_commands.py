"""Every `dear` command on a page exists and takes the options it is shown with."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from dear.cli import build_app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```sh\n(.*?)```", re.S)


def commands(page: Path) -> list[list[str]]:
    """Words of the commands in blocks, and of those in text that have an option."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += [line for line in re.findall(r"`(dear [a-z][^`]+)`", BLOCK.sub("", text)) if " --" in line]
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("dear ")]
    return [line[1:] for line in words if "…" not in line and "B16" not in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of(page: Path) -> None:
    app = get_command(build_app())
    for words in commands(page):
        command, rest = app, words
        while hasattr(command, "commands") and (rest or not command.invoke_without_command):
            assert rest, f"dear {shlex.join(words)} needs a command"
            assert rest[0] in command.commands, f"no command: dear {shlex.join(words)}"
            command, rest = command.commands[rest[0]], rest[1:]
        options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        named = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert named <= {*options, "--help"}, f"dear {shlex.join(words)}: takes {', '.join(sorted(options))}"
