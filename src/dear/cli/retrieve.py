"""`dear retrieve`: images that are alike in one attribute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from dear.cli.options import AS_RUN, DataRoot, Device, Json, Roles, Threads, device_named
from dear.cli.printing import echo, print_json, say, stages
from dear.errors import UsageError

if TYPE_CHECKING:
    from dear.tasks.retrieve import Found


def retrieve(
    query: Annotated[Path, Option("--query", "-q", help="The image to compare with.")],
    gallery: Annotated[
        str, Option("--gallery", "-g", help="A folder of images, a table, a benchmark name, or world:NAME.")
    ],
    run: Annotated[
        Path | None, Argument(help="Run folder; not needed for a search by heads.", **AS_RUN)
    ] = None,
    by: Annotated[
        str | None,
        Option(
            help="heads: the contributions of heads with that role (the default where the role map has such "
            "heads); features: the attribute features of a DeAR run."
        ),
    ] = None,
    roles: Roles = None,
    attribute: Annotated[
        str | None,
        Option("--attribute", "-a", help="color, shape, texture, object, location; all if left out."),
    ] = None,
    top: Annotated[int, Option(help="How many images.")] = 8,
    out: Annotated[
        Path | None, Option("--out", "-o", help="Folder for one contact sheet per attribute.")
    ] = None,
    backbone: Annotated[
        str | None, Option("--backbone", "-b", help="The backbone; for a run, if it moved since training.")
    ] = None,
    data_root: DataRoot = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Find the images that are most like a query in one attribute; the query itself is left out.

    Examples:

    `dear retrieve --backbone mini --query a.png --attribute location --gallery world:scenes --top 8`

    `dear retrieve run --query a.jpg --attribute color --gallery photos/ --by features --out sheets`
    """
    from dear.clip.factory import load
    from dear.runs.folder import load_run
    from dear.tasks.retrieve import head_map_of, retrieve_by_heads
    from dear.tasks.retrieve import retrieve as retrieve_by_features

    if by not in (None, "heads", "features"):
        raise UsageError(f"--by {by}: choose heads or features")
    if run is None and (by == "features" or backbone is None):
        raise UsageError("name a run folder, or a backbone to search by heads with --backbone")
    method = None if run is None else load_run(run, backbone, device_named(device))
    clip = load(str(backbone), device=device_named(device)) if method is None else method.clip
    by_heads = by == "heads" or method is None or (by is None and head_map_of(clip, roles) is not None)
    found: Sequence[Found]
    notice = None
    with stages() as progress:
        shared: dict[str, Any] = {"attribute": attribute, "top": top, "out": out, "root": data_root}
        shared["progress"] = progress
        if method is None or by_heads:
            near = retrieve_by_heads(clip, str(query), gallery, roles=roles, **shared)
            found, notice = near.found, near.notice
        else:
            found = retrieve_by_features(method, str(query), gallery, **shared)
    if notice is not None:
        say(f"notice: {notice}")
    if as_json:
        rows = {
            one.attribute: [{"image": key, "cosine": cosine} for key, cosine in one.pairs] for one in found
        }
        how = "heads" if by_heads else "features"
        print_json({"query": str(query), "by": how, "notice": notice, "attributes": rows})
        return
    for one in found:
        echo(one.attribute)
        for key, cosine in one.pairs:
            echo(f"  {cosine:6.3f}  {key}")
    if out is not None:
        say(f"{out}: contact sheets written")
