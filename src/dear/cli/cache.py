"""`dear cache`: what is kept between commands."""

from __future__ import annotations

import typer

from dear.cli.common import Json, print_json

group = typer.Typer(
    invoke_without_command=True,
    help="What is kept between commands: image features, answers and role maps. Example: `dear cache`",
)


@group.callback(invoke_without_command=True)
def cache(context: typer.Context, as_json: Json = False) -> None:
    """Show what is kept between commands: image features, answers of runs, role maps.

    Everything in it is computed again when it is missing. The variable DEAR_CACHE names another folder,
    DEAR_CACHE_MB the size of the features (2000 by default; 0 keeps none).

    Examples:

    `dear cache`

    `dear cache clear`
    """
    if context.invoked_subcommand is not None:
        return
    from dear._io.feature_store import FeatureStore
    from dear._io.user_cache import cache_folder

    found = FeatureStore().usage()
    maps = len(list((cache_folder() / "roles").glob("*.json")))
    if as_json:
        print_json(
            {
                "folder": str(cache_folder()),
                "rows": found.entries,
                "bytes": found.size,
                "limit_bytes": found.limit,
                "role_maps": maps,
            }
        )
        return
    typer.echo(f"{cache_folder()}")
    typer.echo(
        f"  {found.entries} rows of features and answers, {found.size / 1e6:.1f} MB of at most "
        f"{found.limit / 1e6:,.0f} MB"
    )
    typer.echo(f"  {maps} role maps")


@group.command("clear")
def clear() -> None:
    """Remove everything that is kept.

    Example: `dear cache clear`
    """
    from dear._io.feature_store import FeatureStore
    from dear._io.user_cache import cache_folder

    FeatureStore().clear()
    for path in (cache_folder() / "roles").glob("*.json"):
        path.unlink(missing_ok=True)
    typer.echo(f"{cache_folder()}: cleared")
