"""`dear retrieve`: images that are alike in one attribute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dear._io.printable import shown
from dear.cli.common import DataRoot, Device, Json, device_named, print_json, say, stages


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("retrieve")(retrieve)


def retrieve(
    run: Annotated[Path, typer.Argument(help="Run folder of a DeAR adaptation.", show_default=False)],
    query: Annotated[Path, typer.Option("--query", "-q", help="The image to compare with.")],
    gallery: Annotated[
        str,
        typer.Option("--gallery", "-g", help="A folder of images, a table, a benchmark name, or world:NAME."),
    ],
    attribute: Annotated[
        str | None,
        typer.Option("--attribute", "-a", help="color, shape, texture, object, location; all if left out."),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="How many images.")] = 8,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for one contact sheet per attribute.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option("--backbone", "-b", help="The backbone, if it moved since training.")
    ] = None,
    data_root: DataRoot = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find the images that are most like a query in one attribute's feature space.

    Example: `dear retrieve run --query a.jpg --attribute color --gallery photos/ --top 8 --out sheets`
    """
    from dear.workflows import retrieve as path

    with stages() as told:
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
            progress=told,
        )
    if as_json:
        rows = {
            name: [{"image": key, "cosine": cosine} for key, cosine in pairs]
            for name, pairs in path.keys_of(found).items()
        }
        print_json({"query": str(query), "attributes": rows})
        return
    for one in found:
        typer.echo(one.attribute)
        for key, cosine in zip(one.keys, one.similarity, strict=True):
            typer.echo(f"  {cosine:6.3f}  {shown(key)}")
    if out is not None:
        say(f"{out}: contact sheets written")
