"""The command line: one module per command group; each parses, calls one public function, and prints."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup, TyperOption

HIDDEN = "Hidden"  #: panel of commands that `dear --help` does not list
#: Panels of `dear --help`, in order: command -> module of `dear.cli`.
PANELS: dict[str, dict[str, str]] = {
    "Start": {
        "demo": "demo",
        "zeroshot": "zeroshot",
        "data": "data",
        "backbones": "backbones",
        "methods": "methods",
    },
    "Train": {"label": "label", "choose": "choose", "adapt": "adapt"},
    "Answer": {"predict": "predict", "evaluate": "evaluate", "report": "report", "embed": "embed"},
    "Find problems": {"audit": "audit", "repair": "audit", "drift": "drift"},
    "Heads": {"explain": "explain", "retrieve": "retrieve", "roles": "roles"},
    "Research": {"bench": "bench", "ablate": "bench"},
    "Serve": {
        "studio": "studio",
        "serve": "serve",
        "export": "export",
        "push": "share",
        "pull": "share",
        "bundle": "share",
    },
    HIDDEN: {"speed": "speed", "mini": "pretrain", "pretrain": "pretrain", "cache": "cache"},
}
#: Panels of `dear COMMAND --help`, in addition to "Options": names of parameters.
OPTION_PANELS: dict[str, tuple[str, ...]] = {
    "Classes and texts": ("classes", "classes_file", "template", "texts", "tree", "ensemble", "extend"),
    "Training": ("options", "recipe", "epochs", "balance", "calibrate", "check", "resume", "log"),
    "Unlabeled images": ("unlabeled", "unlabeled_weight"),
    "Heads and concepts": ("roles", "allow_other_roles", "without", "way", "examples", "focus"),
    "Access": ("host", "port", "keys", "rate", "open_metrics", "tls_certificate", "tls_key"),
    "Batches and memory": ("wait_ms", "adapters", "queue", "precision", "drain_seconds"),
    "Processes and clusters": ("engine", "address", "workers", "gpus", "replicas", "route", "ray_address"),
    "Reading data": ("data_root", "margin", "split", "unreadable"),
    "Machine and output": ("device", "threads", "as_json"),
}
COMMANDS = {command: module for commands in PANELS.values() for command, module in commands.items()}


def main() -> None:
    """Run `dear`: one line for what a user can correct, a stack trace only for defects of this package."""
    try:
        from dear.cli.hints import error_message
        from dear.errors import DearError
        from dear.utils.parallel import let_waiting_threads_sleep
        from dear.utils.text import escape_control

        let_waiting_threads_sleep()
        first = sys.argv[1] if len(sys.argv) > 1 else "--help"
        app = build_app(first if first in COMMANDS else None, summary=first in ("-h", "--help"))
        _print_log()
        try:
            app()
        except DearError as error:
            print(f"dear: {escape_control(error_message(error, _options_of(app)))}", file=sys.stderr)
            sys.exit(error.status)
    except KeyboardInterrupt:  # during imports, or a second one
        print("dear: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: stay quiet
        sys.exit(0)


@cache
def build_app(only: str | None = None, summary: bool = False) -> typer.Typer:
    """The `dear` command with its subcommands.

    Args:
        only: a single subcommand, which takes less time than all.
        summary: names and docstrings of the subcommands without their options, for `dear --help`.
    """
    app = typer.Typer(
        name="dear",
        cls=Commands,
        help="Adapt CLIP-like models to your images, and see what each attention head does.",
        epilog="Start with `dear demo`; it needs no weights, no data and no network.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for panel, commands in PANELS.items():
        look: dict[str, Any] = {"rich_help_panel": panel, "hidden": panel == HIDDEN}
        for command in commands:
            if only not in (None, command):
                continue
            module = importlib.import_module(f"dear.cli.{commands[command]}")
            if hasattr(module, "group"):
                app.add_typer(module.group, name=command, **look)
            else:
                function = getattr(module, command)
                app.command(command, cls=Command, **look)(_without_options(function) if summary else function)
    return app


def _options_of(app: typer.Typer) -> set[str]:
    """The options of the command that was called."""
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    return {name for param in command.params for name in param.opts}


def _without_options(function: Callable[..., None]) -> Callable[[], None]:
    """A command that only has the docstring: reading the options of all commands takes 0.2 s."""

    def command() -> None:
        pass

    command.__doc__ = function.__doc__
    return command


class Command(TyperCommand):
    """A command whose help shows many options in panels, in the order of `OPTION_PANELS`."""

    MOST_WITHOUT_PANELS = 12

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        options = [param for param in self.params if isinstance(param, TyperOption)]
        if len(options) > self.MOST_WITHOUT_PANELS:
            panels = {name: panel for panel, names in OPTION_PANELS.items() for name in names}
            for option in options:
                option.rich_help_panel = panels.get(option.name or "")
            order = [None, *OPTION_PANELS]
            self.params.sort(key=lambda param: order.index(getattr(param, "rich_help_panel", None)))


class Commands(TyperGroup):
    """The group of all commands; Ctrl-C and lack of memory end any of them with a message."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the command line."""
        with _errors_as_messages():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _errors_as_messages():
            return super().invoke(ctx)


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    """Turn Ctrl-C and lack of memory into errors with a message; typer alone would print nothing."""
    from dear.errors import Interrupted, OutOfMemory, is_out_of_memory

    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    except (RuntimeError, MemoryError) as error:
        if "torch" not in sys.modules or not is_out_of_memory(error):  # typer exits by a RuntimeError, too
            raise
        raise OutOfMemory("out of memory; use a smaller batch, a smaller backbone or --device cpu") from error


def _version(value: bool) -> None:
    if value:
        from dear import __version__

        typer.echo(f"dear {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _print_log() -> None:
    """Print the messages of the library's logger, notes included, on standard error."""
    log = logging.getLogger("dear")
    log.setLevel(logging.INFO)
    if not any(isinstance(handler, StderrHandler) for handler in log.handlers):
        log.addHandler(StderrHandler())


class StderrHandler(logging.Handler):
    """Prints messages on what standard error is at the time, without control characters."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        from dear.utils.text import escape_control

        print(escape_control(record.getMessage()), file=sys.stderr)
