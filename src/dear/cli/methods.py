"""`dear methods`: the methods, and the paper entry of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Argument

from dear.cli import options as opt
from dear.cli.printing import echo, print_json

if TYPE_CHECKING:
    from dear.methods.papers import Paper


def methods(
    name: Annotated[
        str | None, Argument(help="Method to describe (default: list all).", show_default=False)
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """List the methods that `dear adapt --method` takes, or describe one: paper, settings, our departures.

    Examples:

    `dear methods`

    `dear methods clip-lora`
    """
    from dear.methods import METHODS
    from dear.methods.papers import paper

    if name is not None:
        entry = paper(name)
        if as_json:
            print_json(entry.to_dict())
        else:
            _print(entry)
        return
    if as_json:
        print_json({"methods": {method: kind.about for method, kind in METHODS.items()}})
        return
    width = max(map(len, METHODS))
    for method, kind in METHODS.items():
        echo(f"{method:{width}}  {kind.about}".rstrip())


def _print(entry: Paper) -> None:
    echo(f"{entry.title} ({entry.method})")
    echo(entry.summary)
    if entry.citation:
        echo(f"Paper: {entry.citation}")
    for title, text in (("", entry.description), ("Departures: ", entry.departures)):
        if text:
            echo("")
            for line in f"{title}{text}".splitlines():
                echo(line)
    for title, values in (("Options", entry.options), ("Recipe", entry.recipe), ("Presets", entry.presets)):
        if values:
            echo(f"\n{title}:")
            for option, value in values.items():
                echo(f"  {option}: {value}" if title == "Presets" else f"  {option} = {value!r}")
