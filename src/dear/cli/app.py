"""The `dear` command: its options and the table of its subcommands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dear.cli import (
    adapt,
    audit,
    backbones,
    bench,
    cache,
    choose,
    data,
    demo,
    embed,
    evaluate,
    export,
    methods,
    predict,
    pretrain,
    report,
    retrieve,
    roles,
    serve,
    speed,
    studio,
    zeroshot,
)


@contextmanager
def _spoken() -> Iterator[None]:
    """Ctrl-C and missing memory become sentences; typer by itself would leave without a word."""
    from dear.errors import Interrupted, OutOfMemory

    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("stopped by you") from None
    except (RuntimeError, MemoryError) as error:
        if "torch" not in sys.modules:  # nothing was computed; typer leaves by a RuntimeError, too
            raise
        from dear._io.memory import ran_out

        if not ran_out(error):
            raise
        raise OutOfMemory("out of memory; use a smaller batch, a smaller backbone or --device cpu") from error


class Commands(TyperGroup):
    """The commands; Ctrl-C ends any of them with a sentence."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Read the command line."""
        with _spoken():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _spoken():
            return super().invoke(ctx)


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


def _version(value: bool) -> None:
    if value:
        from dear import __version__

        typer.echo(f"dear {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


for group in (
    demo,
    zeroshot,
    roles,
    choose,
    adapt,
    audit,
    evaluate,
    predict,
    retrieve,
    embed,
    bench,
    export,
    report,
    studio,
    serve,
    pretrain,
    backbones,
    methods,
    data,
    cache,
    speed,
):
    group.add_to(app)
