"""`dear cache`: what is kept between commands."""

from __future__ import annotations

import typer

from dear.cli import options as opt
from dear.cli.printing import echo, print_json

group = typer.Typer(
    invoke_without_command=True,
    help="What is kept between commands: image features, answers and role maps. Example: `dear cache`",
)


@group.callback(invoke_without_command=True)
def cache(context: typer.Context, as_json: opt.Json = False) -> None:
    """Show what is kept between commands: image features, answers of runs, role maps.

    Everything in it is computed again when it is missing. The variable DEAR_CACHE names another folder,
    DEAR_CACHE_MB the size of the features (2000 by default; 0 keeps none).

    Examples:

    `dear cache`

    `dear cache clear`
    """
    if context.invoked_subcommand is not None:
        return
    from dear.utils.feature_store import FeatureStore
    from dear.utils.text import format_count
    from dear.utils.user_cache import cache_folder

    folder, usage = cache_folder(), FeatureStore().usage()
    facts = {"folder": str(folder), "rows": usage.entries, "bytes": usage.size, "limit_bytes": usage.limit}
    maps = len(list((folder / "roles").glob("*.json")))
    if as_json:
        print_json({**facts, "role_maps": maps})
        return
    size = f"{usage.size / 1e6:.1f} MB of at most {usage.limit / 1e6:,.0f} MB"
    rows = format_count(usage.entries, "row")
    echo(f"{folder}\n  {rows} of features and answers, {size}\n  {format_count(maps, 'role map')}")


@group.command("clear")
def clear() -> None:
    """Remove everything that is kept.

    Example: `dear cache clear`
    """
    from dear.utils.feature_store import FeatureStore
    from dear.utils.user_cache import cache_folder

    FeatureStore().clear()
    for path in (cache_folder() / "roles").glob("*.json"):
        path.unlink(missing_ok=True)
    echo(f"{cache_folder()}: cleared")
