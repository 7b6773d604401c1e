"""The command line: one module per command group; each parses, calls and prints."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

#: Modules and their commands, in the order of `dear --help`.
COMMANDS = {
    "demo": ("demo",),
    "zeroshot": ("zeroshot",),
    "roles": ("roles",),
    "choose": ("choose",),
    "adapt": ("adapt",),
    "audit": ("audit", "repair"),
    "evaluate": ("evaluate",),
    "predict": ("predict",),
    "explain": ("explain",),
    "retrieve": ("retrieve",),
    "embed": ("embed",),
    "bench": ("bench", "ablate"),
    "export": ("export",),
    "report": ("report",),
    "studio": ("studio",),
    "serve": ("serve",),
    "pretrain": ("pretrain", "mini"),
    "backbones": ("backbones",),
    "methods": ("methods",),
    "data": ("data",),
    "cache": ("cache",),
    "drift": ("drift",),
    "share": ("push", "pull", "bundle"),
    "speed": ("speed",),
}


def main() -> None:
    """Run `dear`: one line for what a user can correct, a stack trace only for defects of this package."""
    try:
        from dear.cli.hints import sentence
        from dear.errors import DearError
        from dear.utils.text import shown

        known = {command for commands in COMMANDS.values() for command in commands}
        first = sys.argv[1] if len(sys.argv) > 1 else ""
        app = build_app(first if first in known else None)
        _show_notes()
        try:
            app()
        except DearError as error:
            print(f"dear: {shown(sentence(error))}", file=sys.stderr)
            sys.exit(error.status)
        except SystemExit as end:
            if "dear.cli.torch_start" in sys.modules:
                from dear.cli.torch_start import exit_early

                exit_early(end.code)
            raise
    except KeyboardInterrupt:  # while the modules are read, or a second one
        print("dear: stopped by you", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away: nothing to say
        sys.exit(0)


@cache
def build_app(only: str | None = None) -> typer.Typer:
    """The `dear` command: its options and its subcommands, or `only` one of them, which takes less time."""
    app = typer.Typer(
        name="dear",
        cls=Commands,
        help="Adapt CLIP-like models head by head: what each head does, few images, no shortcuts.",
        epilog="Start with `dear demo`; it needs no weights, no data and no network.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, commands in COMMANDS.items():
        wanted = [command for command in commands if only in (None, command)]
        if not wanted:
            continue
        module = importlib.import_module(f"dear.cli.{name}")
        for command in wanted:
            if hasattr(module, "group"):
                app.add_typer(module.group, name=command)
            else:
                app.command(command)(getattr(module, command))
    return app


class Commands(TyperGroup):
    """The commands; Ctrl-C ends any of them with a message."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by name, with the options that all computing commands have."""
        from dear.cli.threads import add_threads

        found = super().get_command(ctx, cmd_name)
        if found is not None:
            add_threads(found)
        return found

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Read the command line."""
        with _errors_as_sentences():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _errors_as_sentences():
            return super().invoke(ctx)


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    """Ctrl-C and missing memory become errors with a message; typer by itself would print nothing."""
    from dear.errors import Interrupted, OutOfMemory, ran_out

    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("stopped by you") from None
    except (RuntimeError, MemoryError) as error:
        if "torch" not in sys.modules or not ran_out(error):  # typer leaves by a RuntimeError, too
            raise
        raise OutOfMemory("out of memory; use a smaller batch, a smaller backbone or --device cpu") from error


def _version(value: bool) -> None:
    if value:
        from dear import __version__

        typer.echo(f"dear {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def _show_notes() -> None:
    """Print what the library's logger says, notes included, on standard error."""
    from dear.utils.text import shown

    class Printed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(shown(record.getMessage()), file=sys.stderr)

    log = logging.getLogger("dear")
    log.setLevel(logging.INFO)
    if not any(type(handler).__name__ == "Printed" for handler in log.handlers):
        log.addHandler(Printed())
