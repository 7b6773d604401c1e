"""`dear retrieve`: images that are alike in one attribute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, say, stages


def retrieve(
    query: Annotated[Path, Option("--query", "-q", help="The image to compare with.")],
    gallery: Annotated[
        str, Option("--gallery", "-g", help="A folder of images, a table, a benchmark name, or world:NAME.")
    ],
    run: Annotated[
        Path | None, Argument(help="Run folder; not needed for a search by heads.", **opt.RUN_OPTIONS)
    ] = None,
    by: Annotated[
        str | None,
        Option(
            help="heads: the contributions of heads with that role (the default where the role map has such "
            "heads); features: the attribute features of a DeAR run."
        ),
    ] = None,
    roles: opt.Roles = None,
    attribute: Annotated[
        str | None,
        Option("--attribute", "-a", help="color, shape, texture, object, location (default: all)."),
    ] = None,
    top: Annotated[int, Option(help="Number of images per attribute.")] = 8,
    out: Annotated[
        Path | None, Option("--out", "-o", help="Folder for one contact sheet per attribute.")
    ] = None,
    backbone: Annotated[
        str | None, Option("--backbone", "-b", help="Backbone; for a run, if it moved since training.")
    ] = None,
    data_root: opt.DataRoot = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Find the images that are most similar to a query in one attribute.

    Examples:

    `dear retrieve --backbone mini --query a.png --attribute location --gallery world:scenes --top 8`

    `dear retrieve run --query a.jpg --attribute color --gallery photos/ --by features --out sheets`
    """
    from dear.tasks.retrieve import retrieve as retrieve_images

    with stages() as progress:
        result = retrieve_images(
            run,
            query=str(query),
            gallery=gallery,
            by=by,
            roles=roles,
            attribute=attribute,
            top=top,
            out=out,
            backbone=backbone,
            data_root=data_root,
            device=device,
            progress=progress,
        )
    if result.notice is not None:
        say(f"notice: {result.notice}")
    if as_json:
        print_json(result.to_dict())
        return
    for match in result:
        echo(match.attribute)
        for key, cosine in match.pairs:
            echo(f"  {cosine:6.3f}  {key}")
    if out is not None:
        say(f"{out}: contact sheets written")
