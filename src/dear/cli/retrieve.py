"""`dear retrieve`: images that are alike in one attribute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dear._io.text import shown
from dear.cli.common import DataRoot, Device, Json, Roles, device_named, print_json, run_folder, say, stages

if TYPE_CHECKING:
    from dear.clip.model import Clip
    from dear.workflows.retrieve import Found


def retrieve(
    query: Annotated[Path, typer.Option("--query", "-q", help="The image to compare with.")],
    gallery: Annotated[
        str,
        typer.Option("--gallery", "-g", help="A folder of images, a table, a benchmark name, or world:NAME."),
    ],
    run: Annotated[
        Path | None,
        typer.Argument(
            help="Run folder; not needed for a search by heads.",
            parser=run_folder,
            metavar="RUN",
            show_default=False,
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            help="heads: the contributions of heads with that role (the default where the role map has such "
            "heads); features: the attribute features of a DeAR run.",
        ),
    ] = None,
    roles: Roles = None,
    attribute: Annotated[
        str | None,
        typer.Option("--attribute", "-a", help="color, shape, texture, object, location; all if left out."),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="How many images.")] = 8,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for one contact sheet per attribute.")
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option("--backbone", "-b", help="The backbone; for a run, if it moved since training."),
    ] = None,
    data_root: DataRoot = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find the images that are most like a query in one attribute; the query itself is left out.

    Examples:

    `dear retrieve --backbone mini --query a.png --attribute location --gallery world:scenes --top 8`

    `dear retrieve run --query a.jpg --attribute color --gallery photos/ --by features --out sheets`
    """
    from dear.errors import UsageError
    from dear.workflows import retrieve as path

    if by not in (None, "heads", "features"):
        raise UsageError(f"--by {by}: choose heads or features")
    if run is None and (by == "features" or backbone is None):
        raise UsageError("name a run folder, or a backbone to search by heads with --backbone")
    found: Sequence[Found]
    with stages() as progress:
        clip = None if by == "features" else _searched(run, backbone, roles, device_named(device), by)
        notice = None
        if clip is not None:
            from dear.workflows.retrieve import retrieve_by_heads

            near = retrieve_by_heads(
                clip,
                str(query),
                gallery,
                roles=roles,
                attribute=attribute,
                top=top,
                out=out,
                root=data_root,
                progress=progress,
            )
            found, notice = near.found, near.notice
        else:
            found = path.retrieve(
                str(run),
                str(query),
                gallery,
                attribute=attribute,
                top=top,
                out=out,
                backbone=backbone,
                device=device_named(device),
                root=data_root,
                progress=progress,
            )
    if notice is not None:
        say(f"notice: {notice}")
    if as_json:
        rows = {
            name: [{"image": key, "cosine": cosine} for key, cosine in pairs]
            for name, pairs in path.keys_of(found).items()
        }
        told_by = "features" if clip is None else "heads"
        print_json({"query": str(query), "by": told_by, "notice": notice, "attributes": rows})
        return
    for one in found:
        typer.echo(one.attribute)
        for key, cosine in zip(one.keys, one.similarity, strict=True):
            typer.echo(f"  {cosine:6.3f}  {shown(key)}")
    if out is not None:
        say(f"{out}: contact sheets written")


def _searched(
    run: Path | None, backbone: str | None, roles: str | None, device: str, by: str | None
) -> Clip | None:
    """The backbone to search by heads; None: its role map has no such heads, so a run's features are used."""
    from dear.clip.factory import load
    from dear.runs.folder import load_run
    from dear.workflows.retrieve import head_map_of

    clip = load(str(backbone), device=device) if run is None else load_run(str(run), backbone, device).clip
    if by == "heads" or run is None or head_map_of(clip, roles) is not None:
        return clip
    return None
