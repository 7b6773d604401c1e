"""`dear methods`: what can be trained."""

from __future__ import annotations

from dear.cli.options import Json
from dear.cli.printing import echo, print_json


def methods(as_json: Json = False) -> None:
    """List the methods that `dear adapt --method` takes, one line each.

    Example: `dear methods`
    """
    from dear.methods import METHODS

    if as_json:
        print_json({"methods": {name: kind.about for name, kind in METHODS.items()}})
        return
    width = max(map(len, METHODS))
    for name, kind in METHODS.items():
        echo(f"{name:{width}}  {kind.about}".rstrip())
