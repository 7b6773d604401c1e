"""`dear backbones`: what can be loaded."""

from __future__ import annotations

import typer

from dear.cli.common import Json, print_json


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("backbones")(backbones)


def backbones(as_json: Json = False) -> None:
    """List the backbones known by name. A folder or a checkpoint file can be given instead of a name.

    Example: `dear backbones`
    """
    from dear.clip.factory import list_backbones

    names = list_backbones()
    if as_json:
        print_json({"backbones": list(names)})
        return
    for name in names:
        typer.echo(name)
